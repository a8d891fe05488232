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
    EventKind.STARTED: "the loop runs; says where the targets come from",
    EventKind.POLICY_LOADED: "a document is in force from the next tick",
    EventKind.POLICY_REJECTED: "a document has a mistake; the old one stays",
    EventKind.VALUE_SET: "an operator put a value above the document",
    EventKind.VALUE_UNSET: "an operator ended that",
    EventKind.VALUE_EXPIRED: "its time was over",
    EventKind.VALUE_DROPPED: "the document no longer allows a value that was set",
    EventKind.SCHEDULE_BEGAN: "a schedule entry is active",
    EventKind.SCHEDULE_ENDED: "a schedule entry is no longer active",
    EventKind.PENDING_RESTART: "a value is in the documents that only a restart puts in force",
    EventKind.FROZEN: "levers stay where they are",
    EventKind.THAWED: "levers may move again",
    EventKind.MODE_SET: "an operator set the mode of levers",
    EventKind.REPORT_FAILED: "the engine did not report",
    EventKind.REPORT_BACK: "it reports again",
    EventKind.TICK_FAILED: "a mistake of the daemon ended a tick",
    EventKind.TASK_FAILED: "one ended what goes on beside the ticks, which begins again",
    EventKind.LEDGER_VIOLATION: "the host ledger is not sound; all levers are frozen",
    EventKind.LEDGER_SOUND: "a check of the whole ledger found nothing",
    EventKind.CANARY_RECORDED: "the canary's answers are learned; others are compared with them",
    EventKind.CANARY_SUSPECT: "answers that may be rounding or corruption; it is asked again",
    EventKind.CANARY_MISMATCH: "another answer came; all levers are frozen",
    EventKind.CANARY_FAILED: "a round did not end",
    EventKind.CANARY_CLEARED: "a round that somebody asked for was clean",
    EventKind.CONTROL_SOCKET_LOST: "the socket's file is gone and cannot be made anew",
    EventKind.CONTROL_SOCKET_BACK: "the socket's file was removed, and is there again",
    EventKind.DOCTOR_FOUND: "the doctor found something new",
    EventKind.DOCTOR_CLEARED: "what the doctor had found is gone",
    EventKind.STATE_NOT_KEPT: "a file of the state folder cannot be written; the node goes on",
    EventKind.STATE_KEPT: "it is written again",
    EventKind.JOURNAL_LOST: "the file was removed or replaced while written; it begins anew",
    EventKind.JOURNAL_SET_ASIDE: "the journal was damaged or of another version; it begins anew",
    EventKind.CLOCK_SET: "somebody set the machine's clock",
    EventKind.KERNELS_PROVED: "our kernels read the right rows on every GPU, fast enough; they run",
    EventKind.KERNELS_FELL_BACK: "vLLM's kernels run, or will after the next start; says why",
    EventKind.OFFLOAD_UNPROVED: "copies of indexer chunks are not proved; nothing is lent",
    EventKind.GPU_LOST: "a GPU fell off the bus or needs a reset",
    EventKind.GPU_BACK: "it answers again",
    EventKind.GPU_THROTTLED: "heat or power holds a GPU's clocks down for 10 s; not its power cap",
    EventKind.GPU_FULL_SPEED: "nothing has held them down for a minute",
    EventKind.STALLED: "calls stand still though memory is free",
    EventKind.STALL_ENDED: "they move again",
    EventKind.ENGINE_DIED: "the engine ended or hangs; calls get 503",
    EventKind.ENGINE_RESTARTING: "another engine starts, by itself or as asked",
    EventKind.ENGINE_READY: "an engine serves",
    EventKind.ENGINE_START_FAILED: "an engine did not come up",
    EventKind.ENGINE_QUARANTINED: "values with which it did not come up are quarantined",
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
