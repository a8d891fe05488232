"""The stable id of every line that the daemon logs. Alerts use the id; the words may change.

A line is known by its logger's family and by its format string. Lines whose text is made elsewhere
name their id in the call. Events use their kind as the id.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

FAMILY: Final = "hisparsed"

LEVERS_MOVED: Final = "levers-moved"
NODE_KIND: Final = "node-kind"
OFFLOAD_LAYOUT: Final = "offload-layout"
GPU_UNREADABLE: Final = "gpu-unreadable"


@dataclass(frozen=True, slots=True)
class LogEvent:
    """``meaning`` is the consequence, where the text does not say it."""

    event_id: str
    level: str
    meaning: str
    words: str = ""
    """Before figures are put in; empty where the call names the id."""


WORDLESS: Final = {
    LEVERS_MOVED: LogEvent(
        LEVERS_MOVED, "info", "a tick moved a lever; level debug if it moved none"
    ),
    GPU_UNREADABLE: LogEvent(
        GPU_UNREADABLE, "warning", "a reading of a GPU is missing; logged once"
    ),
    OFFLOAD_LAYOUT: LogEvent(OFFLOAD_LAYOUT, "info", "where the offload pool of a rank is"),
    NODE_KIND: LogEvent(NODE_KIND, "info", "the kind of the node, and why"),
}
"""Lines whose text is made elsewhere; the call names the id."""

_WORDED: Final = (
    LogEvent(
        "file-not-watched",
        "warning",
        "edits are noticed later; often there are too few inotify watches",
        "Changes of %s cannot be watched (%s); the file is read every %gs.",
    ),
    LogEvent(
        "service-link-left-out",
        "warning",
        "vLLM reads the variable as a port; the node starts without it",
        "%s=%s is ignored: Kubernetes sets it for a service called vllm. "
        "`enableServiceLinks: false` in the pod avoids it.",
    ),
    LogEvent(
        "calls-cut",
        "warning",
        "the engine ended, or the drain time had passed; each client got an error of its API",
        "Cut off %s; clients got an error.",
    ),
    LogEvent(
        "bookkeeping-not-known",
        "warning",
        "same schedules, more CPU time",
        "hisparsed does not know the page bookkeeping of this vLLM and leaves it in place. Steps "
        "take several times the CPU time.",
    ),
    LogEvent(
        "orphans-ended",
        "warning",
        "a daemon was killed while its engine was stopped or stuck; its memory is free now",
        "Ended processes of an engine whose daemon was killed: %s.",
    ),
    LogEvent(
        "shared-memory-removed",
        "warning",
        "a node was killed with all its processes; its shared memory is free now",
        "Removed shared memory of an engine whose node was killed: %s.",
    ),
    LogEvent(
        "shared-memory-unreadable",
        "warning",
        "look for it with `ls -l /dev/shm` while no engine runs",
        "%s cannot be read (%s); memory that it names stays.",
    ),
    LogEvent(
        "shared-memory-not-recorded",
        "warning",
        "check the state folder; nothing is lost unless the whole node is killed",
        "%s cannot be written: %s; shared memory stays if the node is killed.",
    ),
    LogEvent(
        "processes-left",
        "warning",
        "the kernel has not taken their memory back; the next start may find too little",
        "Killed processes of the engine have not ended within %gs and hold memory: %s.",
    ),
    LogEvent(
        "command-refused",
        "warning",
        "nothing changed; the next tick decides again",
        "The engine refused a command: %s",
    ),
    LogEvent(
        "tick-late",
        "warning",
        "the daemon or the engine is short of CPU",
        "Tick %d took more than %gs; %d skipped so far.",
    ),
    LogEvent(
        "tick-failed",
        "error",
        "a bug in the daemon, with its traceback; the loop continues",
        "Tick %d failed.",
    ),
    LogEvent(
        "task-traceback",
        "error",
        "of the event `task-failed`",
        "The %s failed.",
    ),
    LogEvent(
        "document-not-judged",
        "error",
        "a bug in the daemon, with its traceback; the document is rejected",
        "%s cannot be checked.",
    ),
    LogEvent(
        "held-calls-not-judged",
        "error",
        "a bug in the daemon, with its traceback",
        "Held calls cannot be checked; they are refused.",
    ),
    LogEvent(
        "gpus-not-read",
        "error",
        "a bug in the daemon, with its traceback; logged once; the age of the reading grows",
        "The GPUs cannot be read.",
    ),
    LogEvent(
        "targets-unreadable",
        "warning",
        "the policy's start values apply",
        "%s cannot be read: %s; it is ignored.",
    ),
    LogEvent(
        "targets-damaged",
        "warning",
        "the policy's start values apply",
        "%s is damaged or not valid in this version (%s: %s); it is ignored.",
    ),
    LogEvent(
        "targets-of-another-policy",
        "info",
        "expected after a change of the document or the node",
        "%s is of another %s; the policy's start values apply.",
    ),
    LogEvent(
        "targets-not-written",
        "warning",
        "check the state folder: it is full, or not writable",
        "%s cannot be written: %s; a restart begins with earlier targets, or with the policy's "
        "start values.",
    ),
    LogEvent(
        "doctor-failed",
        "warning",
        "the machine was not checked; nothing else changes",
        "The doctor: %s.",
    ),
    LogEvent(
        "doctor-left-behind",
        "debug",
        "nothing",
        "The node ended before the doctor was back.",
    ),
    LogEvent(
        "control-socket-file",
        "warning",
        "same as the events of that name",
        "The control socket: %s",
    ),
    LogEvent(
        "few-files",
        "warning",
        "fewer clients at a time than configured",
        "api.limits.connections: %d, but this process may open %d files; taking "
        "%d connections. Raise LimitNOFILE of the service.",
    ),
    LogEvent(
        "last-good-values-of-another-version",
        "warning",
        "no last good values are known until an engine has served",
        "%s: its last good values are not valid in this version: %s",
    ),
    LogEvent(
        "last-good-values-unreadable",
        "warning",
        "no last good values are known until an engine has served",
        "%s cannot be read (%s); no last good values are known.",
    ),
    LogEvent(
        "last-good-values-not-written",
        "warning",
        "check the state folder",
        "%s cannot be written: %s; a restart of the daemon will lose it.",
    ),
    LogEvent(
        "listening",
        "info",
        "ports are open; calls get 503 until the engine serves",
        "Listening on http://%s:%d/v1, control socket %s.",
    ),
    LogEvent(
        "server-ended",
        "error",
        "a bug in the daemon",
        "A server ended unexpectedly; stopping the node.",
    ),
    LogEvent(
        "ending",
        "error",
        "no engine can be kept running; the service manager decides what follows",
        "Ending with exit code %d.",
    ),
    LogEvent(
        "stopped-while-starting",
        "info",
        "as asked",
        "Stopped while starting.",
    ),
    LogEvent(
        "start-is-slow",
        "warning",
        "the service manager may end the service now",
        "%s took more than %.0fs; not asking for more time.",
    ),
    LogEvent(
        "service-manager-deaf",
        "debug",
        "no effect, unless systemd runs the service",
        "The service manager cannot be notified of %s: %s",
    ),
    LogEvent(
        "restarts-unreadable",
        "warning",
        "one more restart per hour is possible",
        "%s cannot be read (%s); the count of restarts begins at 0.",
    ),
    LogEvent(
        "draining",
        "info",
        "new calls get 503",
        "Draining: %d calls open, at most %gs.",
    ),
    LogEvent(
        "evidence-not-written",
        "warning",
        "the evidence of an engine that died is only in the log",
        "The evidence could not be written: %s.",
    ),
    LogEvent(
        "engine-did-not-start",
        "debug",
        "with its traceback; see the event `engine-start-failed`",
        "The engine did not start.",
    ),
    LogEvent(
        "hot-shrunk",
        "debug",
        "nothing",
        "Shrank %d hot buffers, %s rows moved by rank.",
    ),
    LogEvent(
        "hot-kernels",
        "info",
        "nothing",
        "Hot buffers of %d rows, found by %s's kernels.",
    ),
    LogEvent(
        "proofs-not-read",
        "warning",
        "kernels and copies are checked again, which takes seconds",
        "%s cannot be read (%s); the kernels are checked again.",
    ),
    LogEvent(
        "proofs-not-kept",
        "warning",
        "every start takes seconds longer",
        "%s cannot be written: %s; the next start checks again.",
    ),
    LogEvent(
        "proof-failed",
        "error",
        "vLLM's kernels run and nothing is lent; a bug in the daemon, with its traceback",
        "The check of kernels and copies failed; hisparsed's kernels and copies are not used.",
    ),
    LogEvent(
        "handoff-wrong-role",
        "warning",
        "the router sends prefill calls to a decode node",
        "Request %s is served whole: it asks for do_remote_decode, and this "
        "node's disaggregation.role is decode.",
    ),
    LogEvent(
        "handoff-computed-here",
        "warning",
        "slower, not wrong",
        "Request %s is computed here: %s",
    ),
    LogEvent(
        "handoff-not-fetched",
        "warning",
        "slower, not wrong; look at the peer",
        "Request %s: its prefix was not fetched from %s (%s); %d tokens are computed here.",
    ),
    LogEvent(
        "handoff-not-read",
        "warning",
        "the decode node or the router is gone or slow",
        "The prefix of %s was not read within %g s; its blocks are free again.",
    ),
    LogEvent(
        "standing-still",
        "warning",
        "the event `stalled` follows if it lasts",
        "Nothing runs and %d calls wait with memory free: %s (head %s, %d tokens).",
    ),
    LogEvent(
        "deadlock-broken",
        "warning",
        "one call is slower; if frequent, the host budget is too small",
        "Waiting calls hold the blocks that other calls need, and no call runs; %s (%d tokens) "
        "restarts.",
    ),
)

LINES: Final = {one.words: one for one in _WORDED}
"""By their format string, as in the call."""


def event_id_of(record: logging.LogRecord) -> str | None:
    """``None`` for lines of others, and for lines that name their id themselves."""
    if record.name.partition(".")[0] != FAMILY or not isinstance(record.msg, str):
        return None
    known = LINES.get(record.msg)
    return known.event_id if known is not None else None
