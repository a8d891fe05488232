"""Each request's own miss curve on the reference node, computed at most once in a while.

A report comes every tick and must stay cheap, so curves are kept between reports. Reads what
the resolver counted; decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hisparsed.engine.reference.requests import RequestState
from hisparsed.engine.request_curves import DISTINCT, MAX_REQUESTS, request_curves
from hisparsed.engine.worker_report import RowCurve
from hisparsed.kernels.api import ResolverState

_FRESH_FOR_S = 1.0


class HotCurves:
    """``states``: one an index group. ``clock_s`` is monotonic seconds."""

    def __init__(
        self,
        states: Sequence[ResolverState],
        clock_s: Callable[[], float],
        fresh_for_s: float = _FRESH_FOR_S,
    ) -> None:
        self._states = states
        self._clock_s = clock_s
        self._fresh_for_s = fresh_for_s
        self._begun = [[(0, 0)] * state.num_states for state in states]
        self._curves: dict[str, RowCurve] = {}
        self._computed_s: float | None = None

    def begin(self, row: int) -> None:
        """A request begins in ``row``, or its hot buffer has changed its size."""
        for begun, state in zip(self._begun, self._states, strict=True):
            begun[row] = int(state.step[row]), int(state.counters[row, DISTINCT].sum())

    def by_request(self, requests: Mapping[str, RequestState]) -> Mapping[str, RowCurve]:
        """(hot rows of one group, rows loaded a step over all groups) by request.

        Largest hot buffers first, at most ``MAX_REQUESTS``; requests without enough sampled
        steps are left out.
        """
        now_s = self._clock_s()
        if self._computed_s is None or now_s - self._computed_s >= self._fresh_for_s:
            self._computed_s = now_s
            self._curves = self._compute(requests)
        return self._curves

    def _compute(self, requests: Mapping[str, RequestState]) -> dict[str, RowCurve]:
        leased = sorted(
            ((name, state) for name, state in requests.items() if state.hot_blocks[0]),
            key=lambda one: -len(one[1].hot_blocks[0]),
        )[:MAX_REQUESTS]
        if not leased:
            return {}
        return request_curves(
            self._states,
            [(name, state.row) for name, state in leased],
            lambda group, row: self._begun[group][row],
        )
