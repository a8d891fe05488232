"""Makes docs/events.md from the tables that the daemon logs by.

``python -m tests.bench.event_docs > docs/events.md``; a test keeps the page current.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Final

from hisparsed.logs.event_ids import LINES, WORDLESS
from hisparsed.logs.format import FIELDS
from hisparsed.policy.events import EventKind

KINDS: Final = {
    EventKind.STARTED: "the control loop runs; says where the targets come from",
    EventKind.POLICY_LOADED: "a document is in force from the next tick",
    EventKind.POLICY_REJECTED: "a document is invalid; the old one stays",
    EventKind.VALUE_SET: "an operator set a value that overrides the document",
    EventKind.VALUE_UNSET: "an operator removed an override",
    EventKind.VALUE_EXPIRED: "an override expired",
    EventKind.VALUE_DROPPED: "an override was dropped: the document no longer allows it, or the "
    "file is damaged",
    EventKind.SCHEDULE_BEGAN: "a schedule entry is active",
    EventKind.SCHEDULE_ENDED: "a schedule entry is no longer active",
    EventKind.PENDING_RESTART: "a value in the documents needs a restart",
    EventKind.FROZEN: "levers are frozen",
    EventKind.THAWED: "levers may move again",
    EventKind.MODE_SET: "an operator set the mode of levers",
    EventKind.REPORT_FAILED: "the engine did not report",
    EventKind.REPORT_BACK: "it reports again",
    EventKind.TICK_FAILED: "a bug in the daemon ended a tick",
    EventKind.TASK_FAILED: "a bug in the daemon ended a background task, which restarts",
    EventKind.LEDGER_VIOLATION: "the host ledger is inconsistent; all levers are frozen",
    EventKind.LEDGER_SOUND: "a check of the whole ledger found nothing",
    EventKind.CANARY_RECORDED: "the canary's answers are learned; others are compared with them",
    EventKind.CANARY_SUSPECT: "answers that may be rounding or corruption; the canary asks again",
    EventKind.CANARY_MISMATCH: "a different answer; all levers are frozen",
    EventKind.CANARY_FAILED: "a round of the canary did not end",
    EventKind.CANARY_CLEARED: "a requested round was clean",
    EventKind.CONTROL_SOCKET_LOST: "the socket file is gone and cannot be created",
    EventKind.CONTROL_SOCKET_BACK: "the socket file was removed, and was created again",
    EventKind.DOCTOR_FOUND: "the doctor found something new",
    EventKind.DOCTOR_CLEARED: "a finding of the doctor is gone",
    EventKind.STATE_NOT_KEPT: "a file of the state folder cannot be written; the node continues",
    EventKind.STATE_KEPT: "the file is written again",
    EventKind.JOURNAL_LOST: "the journal was removed or replaced while in use; a new one begins",
    EventKind.JOURNAL_SET_ASIDE: "the journal was damaged or of another version; a new one begins",
    EventKind.CLOCK_SET: "the machine's clock was set",
    EventKind.KERNELS_PROVED: "hisparsed's kernels passed the check on every GPU; they run",
    EventKind.KERNELS_FELL_BACK: "vLLM's kernels run, or will run after the next start; says why",
    EventKind.OFFLOAD_UNPROVED: "copies of indexer chunks failed their check or have none; nothing "
    "is lent",
    EventKind.GPU_LOST: "a GPU fell off the bus or needs a reset",
    EventKind.GPU_BACK: "the GPU answers again",
    EventKind.GPU_THROTTLED: "heat or power has reduced a GPU's clocks for 10 s; not its power cap",
    EventKind.GPU_FULL_SPEED: "the clocks have not been reduced for a minute",
    EventKind.STALLED: "calls make no progress although memory is free",
    EventKind.STALL_ENDED: "calls make progress again",
    EventKind.ENGINE_DIED: "the engine ended or hangs; calls get 503",
    EventKind.ENGINE_RESTARTING: "another engine starts, automatically or on request",
    EventKind.ENGINE_READY: "an engine serves",
    EventKind.ENGINE_START_FAILED: "an engine did not start",
    EventKind.ENGINE_QUARANTINED: "values that did not start an engine are quarantined",
    EventKind.ENGINE_GONE: "no engine can be kept running; the daemon ends",
    EventKind.STOPPED: "the daemon has ended",
}
"""What each kind of event says."""

_HEAD: Final = """\
# Log lines and events

*Reference.* [All pages](README.md)

Made by `python -m tests.bench.event_docs`. With `log.format: json` (the default where no person
watches) every process of a node writes one JSON object a line to standard error, which is journald
under systemd. Ids are stable: alert on `event_id`, not on words. Lines of vLLM and of libraries
have none, and are told by `logger`. No line has text of prompts or answers.

    journalctl -u hisparsed -o cat | jq -c 'select(.event_id == "policy-rejected")'
"""


def document() -> str:
    """The page, ending in a newline."""
    fields = _table(("field", "what"), ((f"`{name}`", what) for name, what in FIELDS.items()))
    return "\n".join([_HEAD, "## Fields", "", *fields, "", *_events(), "", *_lines(), ""])


def _events() -> Iterator[str]:
    yield "## Events"
    yield ""
    yield "Also in the journal and the event stream of the control API. They have an `actor`."
    yield ""
    rows = ((f"`{kind.value}`", kind.level.value, meaning) for kind, meaning in KINDS.items())
    yield from _table(("event_id", "level", "meaning"), rows)


def _lines() -> Iterator[str]:
    yield "## Other lines"
    yield ""
    lines = sorted([*LINES.values(), *WORDLESS.values()], key=lambda one: one.event_id)
    rows = (
        (f"`{one.event_id}`", one.level, one.meaning, one.words and f"`{one.words}`")
        for one in lines
    )
    yield from _table(("event_id", "level", "meaning", "words"), rows)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    sys.stdout.write(document())
