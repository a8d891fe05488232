"""Plays a recorded journal as if its node were running: play, pause, speed, seek.

A feed like the live one. ``status_document``, ``flat_decisions`` and ``whole_tick`` put a recorded
tick in the form of the API's documents, so that pages need not know the source. The daemon's own
state, which a snapshot does not hold, is omitted. Reading happens in the event loop in small
pieces; a tick takes well under a millisecond. Clock and sleep are passed in.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from hisparsed.policy.decisions import Reason, effective_text, reason_of
from hisparsed.policy.derived import HISTORY, derive
from hisparsed.policy.signals import Snapshot
from hisparsed.tui import format as fmt
from hisparsed.tui import updates
from hisparsed.tui.history import FINE_SPAN_S, SPAN_S, values_of
from hisparsed.tui.journal_reader import JournalReader, RecordedTick
from hisparsed.tui.options import ViewError
from hisparsed.tui.wire import Document, build, dig, items, number, text


def status_document(tick: RecordedTick, first_s: float) -> Document:
    """The status as the daemon would have sent it; ``first_s`` is used as its start."""
    snapshot, decision = tick.snapshot, tick.decision
    frozen = dig(snapshot, "frozen_levers") or []
    levers = [_lever(one, frozen) for one in items(decision, "levers")]
    return {
        "at_unix_s": tick.at_unix_s,
        "node": {"kind": "", "model": "recorded journal", "version": "", "started_unix_s": first_s},
        "lifecycle": "serving",
        "recorded": True,
        "observed": snapshot,
        "derived": _derived(snapshot),
        "levers": levers,
        "policy": {
            "generation": dig(decision, "policy_generation"),
            "content_hash": tick.policy_hash,
            "mode": "",
            "effective": effective_text((one["mode"], one["frozen"]) for one in levers),
            "overridden": {},
            "frozen": frozen,
            "last_error": None,
        },
        "loop": {"tick": dig(decision, "tick")},
    }


def _lever(one: Document, frozen: list[str]) -> Document:
    reason = reason_of(text(one, "reason"))
    return {
        **one,
        "mode": "" if reason is None else reason.shown_in_mode,
        "frozen": one.get("lever") in frozen,
        "pending_restart": reason is Reason.PENDING_RESTART,
    }


def _acts(decision: Document) -> bool:
    reason = reason_of(text(decision, "reason"))
    return reason is not None and reason.acts


def _derived(snapshot: Document) -> Document | None:
    """As the daemon computes it; ``None`` where a snapshot of another version lacks a part."""
    try:
        whole = build(Snapshot, {**snapshot, "requests_hot": []})
        return asdict(derive(whole))
    except (KeyError, TypeError, ValueError):
        return None


def flat_decisions(tick: RecordedTick) -> list[Document]:
    """As ``/v1/decisions`` has them."""
    bounded = {one.get("lever"): one.get("found") for one in items(tick.applied, "bounded")}
    return [
        {
            "sequence": tick.sequence,
            "at_unix_s": tick.at_unix_s,
            "tick": dig(tick.decision, "tick"),
            "policy_generation": dig(tick.decision, "policy_generation"),
            "policy_hash": tick.policy_hash,
            "lever": one.get("lever"),
            "code": one.get("reason"),
            "cause": one.get("cause"),
            "limited_by": one.get("limited_by"),
            "acts": _acts(one),
            "notable": one.get("lever") in tick.notable,
            "current": one.get("current"),
            "wanted": one.get("wanted"),
            "in_force": bounded.get(one.get("lever")),
            "error": text(tick.applied, "error") if _acts(one) else None,
            "figures": one.get("figures"),
            "sentence": one.get("sentence"),
            "expected": one.get("expected") or {},
            "outcome": one.get("outcome"),
        }
        for one in items(tick.decision, "levers")
    ]  # fmt: skip


def whole_tick(tick: RecordedTick, later: list[RecordedTick]) -> Document:
    """As ``/v1/decisions/{sequence}`` has it; ``later`` are ticks after it, oldest first."""
    number_of = dig(tick.decision, "tick")
    confirmation = next(
        (one.confirmed for one in later if dig(one.confirmed, "tick") == number_of), None
    )
    after = later[-1] if later else None
    return {
        "sequence": tick.sequence,
        "at_unix_s": tick.at_unix_s,
        "decision": tick.decision,
        "applied": tick.applied,
        "snapshot": tick.snapshot,
        "confirmation": confirmation,
        "after": None
        if after is None
        else {"at_unix_s": after.at_unix_s, "snapshot": after.snapshot},
    }


SPEEDS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1_000.0)
FRAME_S = 0.25
_SEEK_S = {"back": -30.0, "on": 30.0, "far_back": -600.0, "far_on": 600.0}
_COARSE_SAMPLES = 200
_FINE_SAMPLES = 100
"""Of the last two hours and of the last five minutes: no chart has many more columns."""
_DECISIONS_BEFORE = 200
_EVENTS_BEFORE = 100
_MOST_TICKS_A_FRAME = 200
_EFFECT_S = 60.0
_LATER_TICKS = 40

OnUpdate = Callable[[updates.Update], None]


def _samples(first: int, last: int, most: int) -> range:
    """Places from ``first`` to ``last``, at most twice ``most``, in steps of a power of two: the
    same ones wherever the range begins."""
    step = 1
    while (last - first) // step > 2 * most:
        step *= 2
    return range(-(-first // step) * step, last + 1, step)


class JournalPlayer:
    """``run`` plays; ``command`` takes the actions of keys. ``want_requests`` changes nothing
    here."""

    def __init__(
        self,
        reader: JournalReader,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        self.reader = reader
        self.want_requests = False
        self.playing = False
        self.speed = 1.0
        self.at_s = reader.times[-1]
        """The journal's time that is shown."""
        self._clock = clock
        self._sleep = sleep
        self._on_update: OnUpdate = lambda _: None
        self._next = 0
        self._rows: dict[int, list[float | None] | None] = {}
        self._policy: int | None = None
        """Number of the policy that was sent; 0 where the journal holds none."""

    @property
    def begin_s(self) -> float:
        return self.reader.times[0]

    @property
    def end_s(self) -> float:
        return self.reader.times[-1]

    def words(self) -> str:
        """The position, for the header."""
        state = "playing" if self.playing else "paused"
        if self.at_s >= self.end_s:
            state = "at the end"
        place = f"{fmt.moment(self.at_s)}, {fmt.whole_duration(self.at_s - self.begin_s)}"
        damage = f"  {self.reader.damage}" if self.reader.damage else ""
        return (
            f"journal: {state} x{self.speed:g}, {place} of "
            f"{fmt.whole_duration(self.end_s - self.begin_s)}{damage}"
        )

    # --- feed ---------------------------------------------------------------------

    def start(self, on_update: OnUpdate) -> JournalPlayer:
        self._on_update = on_update
        return self

    async def run(self) -> None:
        self._on_update(updates.Connected())
        self.seek(self.at_s)
        before = self._clock()
        while True:
            await self._sleep(FRAME_S)
            now = self._clock()
            self.advance(max(0.0, now - before))
            before = now

    async def tick(self, entry: Document) -> Document:
        """Raises ``ViewError`` when the journal does not have it."""
        at_s, sequence = number(entry, "at_unix_s") or 0.0, int(number(entry, "sequence") or 0)
        place = self.reader.place_of(sequence, at_s)
        tick = self.reader.tick(place) if place is not None else None
        if place is None or tick is None:
            raise ViewError("the journal cannot be read there")
        last = self.reader.place_at(at_s + _EFFECT_S)
        first = range(place + 1, min(place + 6, last + 1))
        places = sorted({*first, *range(place + 1, last + 1)[-1:]})
        found = (self.reader.tick(one) for one in places[:_LATER_TICKS])
        later = [one for one in found if one is not None and one.run == tick.run]
        return whole_tick(tick, later)

    def refresh_requests(self) -> None:
        self._on_update(updates.RequestUpdate(None, "a journal does not hold single requests"))

    def refresh_policy(self) -> None:
        """The policy of the time that is shown, unless it is there already."""
        found = self.reader.policy_at(self.at_s)
        kept, document = found if found is not None else (0, {})
        if kept != self._policy:
            self._policy = kept
            self._on_update(updates.PolicyUpdate(document))

    def refresh_decisions(self, lever: str | None, code: str | None) -> None:
        """The latest whole ticks; the page chooses those that fit."""
        first = max(0, self._next - _DECISIONS_BEFORE)
        self._send_decisions(self._read(range(first, self._next)), every=True)

    # --- playing ------------------------------------------------------------------

    def command(self, what: str) -> None:
        """toggle, faster, slower, back, on, far_back, far_on, previous_move or next_move."""
        if what == "toggle":
            if self.at_s >= self.end_s:
                self.seek(self.begin_s)
                self.playing = True
            else:
                self.playing = not self.playing
        elif what in ("faster", "slower"):
            place = SPEEDS.index(self.speed) + (1 if what == "faster" else -1)
            self.speed = SPEEDS[max(0, min(place, len(SPEEDS) - 1))]
        elif what in _SEEK_S:
            self.seek(self.at_s + _SEEK_S[what])
        elif what == "previous_move":
            place = bisect_left(self.reader.moves, self.at_s) - 1
            self.seek(self.reader.moves[place] if place >= 0 else self.begin_s)
        elif what == "next_move":
            place = bisect_right(self.reader.moves, self.at_s)
            moves = self.reader.moves
            self.seek(moves[place] if place < len(moves) else self.end_s)
        else:
            raise ValueError(f"the player knows no {what!r}")

    def advance(self, real_s: float) -> None:
        """Show the ticks of ``real_s`` of playing."""
        if not self.playing or self.at_s >= self.end_s:
            return
        self.at_s = min(self.end_s, self.at_s + real_s * self.speed)
        last = self.reader.place_at(self.at_s)
        if last < self._next:
            return
        first = self._next
        self._next = last + 1
        places = range(first, last + 1)
        if len(places) > _MOST_TICKS_A_FRAME:
            # Too fast to show every tick: charts take samples, and no move is omitted.
            places = range(first, last + 1, len(places) // _MOST_TICKS_A_FRAME + 1)
        ticks = self._read(places)
        self._send_decisions(self._read(self._moves_in(first, last + 1)), every=False)
        for tick in [*ticks[:-1], *self._read([last])]:
            self._on_update(updates.StatusUpdate(status_document(tick, self.begin_s)))
        begin_s = self.reader.times[first - 1] if first else self.begin_s - 1
        self._send_events(begin_s, self.at_s)
        self.refresh_policy()

    def seek(self, at_s: float) -> None:
        """Jump, and show the two hours before."""
        self.at_s = max(self.begin_s, min(self.end_s, at_s))
        last = self.reader.place_at(self.at_s)
        first = max(0, self.reader.place_at(self.at_s - SPAN_S))
        fine = max(first, self.reader.place_at(self.at_s - FINE_SPAN_S))
        self._next = last + 1
        self._on_update(updates.StartOver())
        places = {*_samples(first, last, _COARSE_SAMPLES), *_samples(fine, last, _FINE_SAMPLES)}
        rows = [row for place in sorted(places) if (row := self._row(place)) is not None]
        columns = ["at_unix_s", *HISTORY]
        self._on_update(updates.HistoryUpdate({"columns": columns, "rows": rows}))
        for tick in self._read([last]):
            self._on_update(updates.StatusUpdate(status_document(tick, self.begin_s)))
        moves = self._moves_in(first, last + 1)[-_DECISIONS_BEFORE:]
        self._send_decisions(self._read(moves), every=False)
        self._send_events(self.at_s - SPAN_S, self.at_s)
        self._policy = None
        self.refresh_policy()

    def _row(self, place: int) -> list[float | None] | None:
        """A sample for the charts. Cached, since jumps often show the same time again."""
        if place not in self._rows:
            snapshot = self.reader.snapshot(place)
            self._rows[place] = None if snapshot is None else self._sample(place, snapshot)
        return self._rows[place]

    def _sample(self, place: int, snapshot: Document) -> list[float | None]:
        shown = {"observed": snapshot, "derived": _derived(snapshot)}
        return [self.reader.times[place], *values_of(shown)]

    def _moves_in(self, first: int, beyond: int) -> list[int]:
        times, moves = self.reader.times, self.reader.moves
        if first >= beyond:
            return []
        begin, end = bisect_left(moves, times[first]), bisect_right(moves, times[beyond - 1])
        return [self.reader.place_at(at) for at in moves[begin:end]]

    def _read(self, places: Any) -> list[RecordedTick]:
        found = (self.reader.tick(place) for place in places)
        return [tick for tick in found if tick is not None]

    def _send_decisions(self, ticks: list[RecordedTick], *, every: bool) -> None:
        decisions = [
            one for tick in ticks for one in flat_decisions(tick) if every or one["notable"]
        ]
        if decisions:
            self._on_update(updates.DecisionUpdate(decisions))

    def _send_events(self, begin_s: float, end_s: float) -> None:
        events = self.reader.events(begin_s, end_s, _EVENTS_BEFORE)
        if events:
            self._on_update(updates.EventUpdate(events))
