"""The stable id of every line that the daemon logs. Alerts use the id; the words may change.

A line is known by its logger's family and by its format string. Lines whose words are made
elsewhere name their id in the call. Events beside the ticks use their kind as the id.
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
    """``meaning`` says what follows from it, where the words do not."""

    event_id: str
    level: str
    meaning: str
    words: str = ""
    """Before figures are put in; empty where the call names the id."""


WORDLESS: Final = {
    LEVERS_MOVED: LogEvent(LEVERS_MOVED, "info", "a tick moved a lever; debug where it held all"),
    GPU_UNREADABLE: LogEvent(GPU_UNREADABLE, "warning", "a figure of a GPU is missing; said once"),
    OFFLOAD_LAYOUT: LogEvent(OFFLOAD_LAYOUT, "info", "where a rank's offload pool lies"),
    NODE_KIND: LogEvent(NODE_KIND, "info", "which body the node has, and why"),
}
"""Lines whose words are made elsewhere; the call names the id."""

_WORDED: Final = (
    LogEvent(
        "file-not-watched",
        "warning",
        "edits are seen a little later; often too few inotify watches",
        "Changes of %s cannot be watched (%s); they are looked at every %gs.",
    ),
    LogEvent(
        "service-link-left-out",
        "warning",
        "vLLM reads the variable as a port; the node starts without it",
        "%s=%s is left out: Kubernetes sets it for a service called vllm. "
        "`enableServiceLinks: false` in the pod keeps it away.",
    ),
    LogEvent(
        "calls-cut",
        "warning",
        "the engine ended, or a drain was over; each client got an error of its API",
        "%s were cut off; their clients got an error.",
    ),
    LogEvent(
        "bookkeeping-not-known",
        "warning",
        "the same schedules, computed slower",
        "This vLLM's bookkeeping of pages is not one that hisparsed knows; it stays in force. "
        "Steps take several times the CPU time.",
    ),
    LogEvent(
        "orphans-ended",
        "warning",
        "a daemon was killed while its engine was stopped or stuck; its memory is free now",
        "Ended processes of an engine whose daemon was killed: %s.",
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
        "nothing changed; the next tick decides anew",
        "The engine refused a command: %s",
    ),
    LogEvent(
        "tick-late",
        "warning",
        "the daemon or the engine is short of CPU",
        "Tick %d took over %gs; %d left out so far.",
    ),
    LogEvent(
        "tick-failed",
        "error",
        "a mistake of the daemon, with its traceback; the loop goes on",
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
        "a mistake of the daemon, with its traceback; the document is rejected",
        "%s cannot be judged.",
    ),
    LogEvent(
        "held-calls-not-judged",
        "error",
        "a mistake of the daemon, with its traceback",
        "Calls that are held back cannot be judged; they are refused.",
    ),
    LogEvent(
        "gpus-not-read",
        "error",
        "a mistake of the daemon, with its traceback; said once, the reading's age grows",
        "The GPUs cannot be read.",
    ),
    LogEvent(
        "targets-unreadable",
        "warning",
        "the policy's start counts",
        "%s cannot be read: %s; it is ignored.",
    ),
    LogEvent(
        "targets-damaged",
        "warning",
        "the policy's start counts",
        "%s is damaged or not of this version (%s: %s); it is ignored.",
    ),
    LogEvent(
        "targets-of-another-policy",
        "info",
        "as it should be after another document or node",
        "%s is of another %s; the policy's start counts.",
    ),
    LogEvent(
        "targets-not-written",
        "warning",
        "see to the state folder: full, or not writable",
        "%s cannot be written: %s; a restart begins with the targets before, or with "
        "the policy's start.",
    ),
    LogEvent(
        "doctor-failed",
        "warning",
        "what the machine lacks is not known; nothing else follows",
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
        "as the events of that name",
        "The control socket: %s",
    ),
    LogEvent(
        "few-files",
        "warning",
        "fewer clients at once than configured",
        "api.limits.connections: %d, but this process may open %d files; taking "
        "%d connections. Raise LimitNOFILE of the service.",
    ),
    LogEvent(
        "last-good-values-of-another-version",
        "warning",
        "a quarantine falls back on nothing until an engine has served",
        "%s: its last good values are not of this version: %s",
    ),
    LogEvent(
        "last-good-values-unreadable",
        "warning",
        "a quarantine falls back on nothing until an engine has served",
        "%s cannot be read (%s); no last good values are known.",
    ),
    LogEvent(
        "last-good-values-not-written",
        "warning",
        "see to the state folder",
        "%s cannot be written: %s; a restart of the daemon will not know it.",
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
        "a mistake of the daemon",
        "A server ended by itself; stopping the node.",
    ),
    LogEvent(
        "ending",
        "error",
        "no engine can be kept running; the service manager takes over",
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
        "%s took over %.0fs; asking for no more time.",
    ),
    LogEvent(
        "service-manager-deaf",
        "debug",
        "nothing, unless systemd runs the service",
        "The service manager cannot be told %s: %s",
    ),
    LogEvent(
        "restarts-unreadable",
        "warning",
        "one more restart an hour is possible",
        "%s cannot be read (%s); restarts begin to count anew.",
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
        "of an engine that died; the log is all there is",
        "The evidence could not be written: %s.",
    ),
    LogEvent(
        "engine-did-not-start",
        "debug",
        "with its traceback; the event `engine-start-failed` tells",
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
        "kernels and copies are proved again, which takes seconds",
        "%s cannot be read (%s); the kernels are proved anew.",
    ),
    LogEvent(
        "proofs-not-kept",
        "warning",
        "every start takes some seconds longer",
        "%s cannot be written: %s; the next start proves anew.",
    ),
    LogEvent(
        "proof-failed",
        "error",
        "vLLM's kernels run and nothing is lent; a mistake of the daemon, with its traceback",
        "The proof of kernels and copies failed; nothing of ours is trusted.",
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
        "the event `stalled` follows where it lasts",
        "Nothing runs and %d calls wait with memory free: %s (head %s, %d tokens).",
    ),
    LogEvent(
        "deadlock-broken",
        "warning",
        "one call is slower; frequent ones mean too small a host budget",
        "Calls that wait hold what the others need and nothing runs; %s (%d tokens) starts anew.",
    ),
)

LINES: Final = {one.words: one for one in _WORDED}
"""By their words, as the call has them."""


def event_id_of(record: logging.LogRecord) -> str | None:
    """``None`` for lines of others, and for lines that name their id themselves."""
    if record.name.partition(".")[0] != FAMILY or not isinstance(record.msg, str):
        return None
    known = LINES.get(record.msg)
    return known.event_id if known is not None else None
