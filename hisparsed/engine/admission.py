"""Admission under over-subscription: the order in which waiting calls start, and the live set.

First-come order plus LRU collapses when the live set outgrows the pools: calls lose their prefix
while they queue. Starting the cheapest call to recompute first uses the prefixes that are held;
ageing bounds how long any call can be passed over.

The live set is the sessions that are likely to come back. A call belongs to the session whose
earlier prompt is the longest prefix of the call's prompt; block hashes are chained, so one look-up
per block finds it. Prefixes that sessions share (system prompts) count once per session, so the
live set is rather too large. Pure: time is passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_ROUNDING = 1e-9


@dataclass(frozen=True)
class WaitingCall:
    """A waiting call: ``recompute_tokens`` are those that no pool holds any more."""

    index: int
    recompute_tokens: int
    waited_s: float


class OldestTurn:
    """Starts after which the call that has waited longest starts, however expensive.

    Ageing alone lets calls through in bursts, and if the node cannot recompute that many, the
    result is the order of arrival again. A share of the starts avoids this.
    """

    def __init__(self) -> None:
        self._waited: frozenset[str] = frozenset()
        self._oldest = ""
        self._credit = 0.0

    def due(self, waiting: Iterable[str], oldest: str, share: float) -> bool:
        """``waiting``: calls before a pass, which include the ``oldest``. A call that no longer
        waits has started. A turn stays until it is taken, and there is at most one."""
        now = frozenset(waiting)
        started = self._waited - now
        if self._oldest in started:
            self._credit = 0.0
        self._credit += share * len(started - {self._oldest})
        self._waited, self._oldest = now, oldest
        return self._credit >= 1.0 - _ROUNDING


def held_prefix_first(
    calls: Sequence[WaitingCall], ageing_s: float, *, oldest_first: bool = False
) -> list[int]:
    """Indices in starting order: aged calls by waiting time, then cheapest to recompute.

    ``oldest_first`` puts the call that has waited longest first. Ties keep the order of arrival, so
    the result is stable and deterministic.
    """
    if oldest_first and calls:
        ageing_s = min(ageing_s, max(call.waited_s for call in calls))
    aged = [call for call in calls if call.waited_s >= ageing_s]
    fresh = [call for call in calls if call.waited_s < ageing_s]
    aged.sort(key=lambda call: (-call.waited_s, call.index))
    fresh.sort(key=lambda call: (call.recompute_tokens, call.index))
    return [call.index for call in (*aged, *fresh)]


@dataclass
class LiveSession:
    tokens: int
    last_seen_s: float
    open_calls: int = 0
    marks: list[bytes] = field(default_factory=list)


class SessionTable:
    """Sessions seen within ``ttl_s``; totals are kept incrementally."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.live_tokens = 0
        self._by_mark: dict[bytes, int] = {}
        self._sessions: OrderedDict[int, LiveSession] = OrderedDict()
        self._by_request: dict[str, int] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def knows(self, hashes: Sequence[bytes]) -> bool:
        """Whether a call with these block hashes continues a session in the live set."""
        return self._find(hashes) is not None

    def start(self, request_id: str, hashes: Sequence[bytes], tokens: int, now_s: float) -> bool:
        """A call arrived; true when it continues a known session."""
        found = self._find(hashes)
        session_id = self._new(now_s) if found is None else found
        session = self._sessions[session_id]
        session.open_calls += 1
        self._by_request[request_id] = session_id
        self._update(session_id, session, hashes, tokens, now_s)
        return found is not None

    def finish(self, request_id: str, hashes: Sequence[bytes], tokens: int, now_s: float) -> None:
        """A call ended with ``tokens`` in its KV; unknown requests are ignored."""
        session_id = self._by_request.pop(request_id, None)
        if session_id is None:
            return
        session = self._sessions[session_id]
        session.open_calls -= 1
        self._update(session_id, session, hashes, tokens, now_s, keep_marks=True)

    def expire(self, now_s: float) -> None:
        """Drop sessions without an open call that were last seen over ``ttl_s`` ago."""
        for session_id, session in list(self._sessions.items()):
            if session.last_seen_s + self.ttl_s > now_s:
                break
            if session.open_calls:
                session.last_seen_s = now_s
                self._sessions.move_to_end(session_id)
                continue
            del self._sessions[session_id]
            self.live_tokens -= session.tokens
            self._unmark(session)

    def _find(self, hashes: Sequence[bytes]) -> int | None:
        for block_hash in reversed(hashes):
            session_id = self._by_mark.get(block_hash)
            if session_id is not None:
                return session_id
        return None

    def _new(self, now_s: float) -> int:
        session_id = self._next_id
        self._next_id += 1
        self._sessions[session_id] = LiveSession(tokens=0, last_seen_s=now_s)
        return session_id

    def _update(
        self,
        session_id: int,
        session: LiveSession,
        hashes: Sequence[bytes],
        tokens: int,
        now_s: float,
        *,
        keep_marks: bool = False,
    ) -> None:
        self.live_tokens += tokens - session.tokens
        session.tokens = tokens
        session.last_seen_s = now_s
        self._sessions.move_to_end(session_id)
        if not keep_marks:
            self._unmark(session)
        if hashes:
            mark = hashes[-1]
            self._by_mark[mark] = session_id
            session.marks.append(mark)

    def _unmark(self, session: LiveSession) -> None:
        for mark in session.marks:
            owner = self._by_mark.get(mark)
            if owner is not None and self._sessions.get(owner, session) is session:
                del self._by_mark[mark]
        session.marks.clear()
