"""The known state of one node: the latest documents, and the recent past in bounded rings.

Pure: updates go in with the time, pages read it. Makes no requests and draws nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from enum import StrEnum

from hisparsed.tui import format as fmt
from hisparsed.tui import updates
from hisparsed.tui.history import ChartHistory, values_of
from hisparsed.tui.wire import Document, dig, items, number, text

DECISIONS_KEPT = 2_000
EVENTS_KEPT = 500
LOG_LINES_KEPT = 2_000


class Connection(StrEnum):
    """The state of the connection to the node's API."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    LOST = "disconnected"


@dataclass(frozen=True, slots=True)
class Urgency:
    """How urgently a node needs attention: the higher, the worse; ``word`` names the cause.

    ``sentence`` explains it, unless the engine's state or the link already does.
    """

    rank: int
    word: str
    sentence: str = ""


NOT_WELL = 40
"""The rank from which on a node is not healthy; below it a resource is short."""


class NodeModel:
    """One node. ``revision`` grows with every update, so that a page sees a change.

    ``label`` distinguishes nodes; if it was not ``named``, pages show the node's own name.
    """

    def __init__(self, label: str, address: str = "", *, named: bool = True) -> None:
        self.label = label
        self._named = named
        self.address = address
        self.link = Connection.CONNECTING
        self.link_since_s: float | None = None
        self.link_why = ""
        self.revision = 0
        self.history = ChartHistory()
        self._forget()

    def _forget(self) -> None:
        self.status: Document | None = None
        self.status_received_s: float | None = None
        self.policy: Document | None = None
        self.keys: Document | None = None
        self.requests: Document | None = None
        self.requests_why = ""
        self.decisions: deque[Document] = deque(maxlen=DECISIONS_KEPT)
        self.events: deque[Document] = deque(maxlen=EVENTS_KEPT)
        self.logs: deque[Document] = deque(maxlen=LOG_LINES_KEPT)
        self.history.clear()

    # --- read by pages ----------------------------------------------------------

    @property
    def name(self) -> str:
        """The node's name on pages."""
        own = text(self.status, "node.name")
        return self.label if self._named or not own else own

    @property
    def observed(self) -> Document:
        """``observed`` of the status; empty before the first report."""
        found = dig(self.status, "observed")
        return found if isinstance(found, dict) else {}

    @property
    def derived(self) -> Document:
        """``derived`` of the status; empty before the first report."""
        found = dig(self.status, "derived")
        return found if isinstance(found, dict) else {}

    @property
    def node_time_s(self) -> float | None:
        """The node's own time at its latest status."""
        return number(self.status, "at_unix_s")

    def node_now_s(self, now_s: float) -> float | None:
        """The node's own time by now, where this machine's is ``now_s``."""
        at_s, received_s = self.node_time_s, self.status_received_s
        if at_s is None or received_s is None:
            return at_s
        return at_s + max(0.0, now_s - received_s)

    @property
    def generation(self) -> int | None:
        found = number(self.status, "policy.generation")
        return None if found is None else int(found)

    @property
    def stale(self) -> bool:
        """Whether the shown values are old."""
        return self.link is not Connection.CONNECTED

    @property
    def outdated(self) -> bool:
        """Whether the observed values are old: no link, or no engine."""
        state = text(self.status, "engine.state")
        return self.stale or state not in (None, "serving", "draining")

    def severity(self) -> Urgency:
        """The order of the fleet, worst first."""
        return max(self.troubles(), key=lambda one: one.rank, default=Urgency(0, "ok"))

    def troubles(self) -> Iterator[Urgency]:
        """All current problems, in no order."""
        lifecycle, engine = text(self.status, "lifecycle"), text(self.status, "engine.state")
        if self.link is Connection.LOST:
            yield Urgency(90, "disconnected")
            return
        if self.status is None:
            yield Urgency(70, "connecting")
            return
        if lifecycle == "engine-gone":
            yield Urgency(95, "engine gone")
        elif engine == "failed":
            yield Urgency(95, "engine failed")
        elif engine == "restarting":
            yield Urgency(85, "engine restarting")
        elif engine == "starting":
            yield Urgency(82, "engine starting")
        elif lifecycle not in ("serving", None):
            yield Urgency(80, lifecycle)
        elif not self.observed:
            yield Urgency(75, "no report yet")
        yield from self._troubles_of_loop()
        yield from self._troubles_of_node()
        yield from self._shortages()

    def _troubles_of_loop(self) -> Iterator[Urgency]:
        violations = items(self.observed, "ledger.violations")
        if violations:
            why = text(violations[0], "sentence") or ""
            yield Urgency(92, "host ledger broken", f"the host ledger is broken: {why}")
        stalled = text(self.status, "stalled")
        if stalled:
            yield Urgency(88, "stalled", stalled)
        age_s, tick_s = number(self.observed, "report_age_s"), number(self.status, "loop.tick_s")
        if age_s is not None and age_s > max(5.0, 5 * (tick_s or 1.0)):
            yield Urgency(
                65, "report is old", f"the engine last reported {fmt.duration(age_s)} ago"
            )
        failed = number(self.status, "loop.failed_ticks")
        if failed:
            yield Urgency(60, "ticks failed", f"{fmt.counted(failed, 'tick')} failed, see page 5")

    def _troubles_of_node(self) -> Iterator[Urgency]:
        status = self.status
        if text(status, "canary.state") == "mismatch":
            why = text(status, "canary.sentence") or ""
            yield Urgency(87, "canary differs", f"the canary got another answer: {why}")
        ended = [one for one in items(status, "background") if one.get("running") is False]
        if ended:
            names = ", ".join(str(one.get("name")) for one in ended)
            yield Urgency(55, "task ended", f"not running: {names}")
        if dig(status, "journal.writing") is False:
            why = text(status, "journal.error") or "see page 5"
            yield Urgency(50, "journal stopped", f"the journal is not written: {why}")
        fatal = number(status, "doctor.fatal")
        if fatal:
            yield Urgency(
                48, "doctor: fatal", f"the doctor found {fmt.whole(fatal)} fatal, see page 5"
            )
        unkept = dig(status, "not_kept")
        if isinstance(unkept, list) and unkept:
            yield Urgency(47, "state not kept", f"not kept on disk: {unkept[0]}")
        if dig(status, "engine.quarantined") is not None:
            yield Urgency(
                46, "values quarantined", "values that did not start are quarantined, see page 5"
            )
        if text(status, "policy.last_error"):
            yield Urgency(
                45, "policy rejected",
                f"the policy file is invalid, so generation {self.generation} stays in force, "
                "see page 4",
            )  # fmt: skip

    def _shortages(self) -> Iterator[Urgency]:
        """The limit of a healthy node."""
        if dig(self.observed, "gpu.waiting_for_blocks"):
            yield Urgency(30, "short of GPU blocks")
        coverage = number(self.derived, "coverage")
        if coverage is not None and coverage < 1:
            yield Urgency(20, "coverage low")
        if number(self.observed, "requests.waiting"):
            yield Urgency(10, "calls wait")

    def frozen_copy(self) -> NodeModel:
        """A copy of this moment; later updates do not change it."""
        frozen = copy(self)
        frozen.decisions, frozen.events = self.decisions.copy(), self.events.copy()
        frozen.logs, frozen.history = self.logs.copy(), self.history.copy()
        return frozen

    # --- written by feeds ---------------------------------------------------------

    def apply(self, update: updates.Update, now_s: float) -> None:
        """``now_s`` is this machine's Unix time."""
        self.revision += 1
        match update:
            case updates.Connected():
                self._set_link(Connection.CONNECTED, now_s, "")
            case updates.Lost(why):
                self._set_link(Connection.LOST, now_s, why)
            case updates.StartOver():
                self._forget()
            case updates.StatusUpdate(document):
                self._take_status(document, now_s)
            case updates.DecisionUpdate(decisions):
                self._merge(self.decisions, decisions)
            case updates.EventUpdate(events):
                self._merge(self.events, events)
            case updates.LogUpdate(lines):
                self._take_logs(lines)
            case updates.PolicyUpdate(document):
                self.policy = document
            case updates.KeyUpdate(document):
                self.keys = document
            case updates.HistoryUpdate(document):
                self.history.load(document)
            case updates.RequestUpdate(table, why):
                self.requests, self.requests_why = table, why

    def _set_link(self, link: Connection, now_s: float, why: str) -> None:
        if link is not self.link:
            self.link, self.link_since_s = link, now_s
        self.link_why = why

    def _take_status(self, document: Document, now_s: float) -> None:
        before = number(self.status, "node.started_unix_s")
        started = number(document, "node.started_unix_s")
        if before is not None and started != before:
            # Another daemon answers: old log lines and requests are not its own.
            self.logs.clear()
            self.requests = None
        self.status, self.status_received_s = document, now_s
        at_s = number(document, "at_unix_s")
        observed = dig(document, "observed")
        if at_s is not None and observed is not None:
            self.history.add(at_s, values_of(document))
        elif at_s is not None:
            self.history.pass_to(at_s)
        self._merge(self.events, items(document, "events"))

    def _merge(self, ring: deque[Document], new: list[Document]) -> None:
        """Newest first, each once."""
        known = {_identity(one) for one in ring}
        fresh = [one for one in new if _identity(one) not in known]
        if not fresh:
            return
        fresh.sort(key=_age_order)
        if ring and _age_order(fresh[0]) < _age_order(ring[0]):
            merged = sorted([*ring, *fresh], key=_age_order)
            ring.clear()
            ring.extendleft(merged[-(ring.maxlen or 0) :])
        else:
            ring.extendleft(fresh)

    def _take_logs(self, lines: list[Document]) -> None:
        newest = number(self.logs[-1], "sequence") if self.logs else None
        self.logs.extend(
            one for one in lines if newest is None or (number(one, "sequence") or 0) > newest
        )


def _identity(entry: Document) -> tuple[object, ...]:
    return (number(entry, "at_unix_s"), number(entry, "sequence"), text(entry, "lever"))


def _age_order(entry: Document) -> tuple[float, float]:
    return (number(entry, "at_unix_s") or 0.0, number(entry, "sequence") or 0.0)
