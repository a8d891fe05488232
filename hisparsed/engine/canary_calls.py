"""The daemon's own requests in the engine: brought into one residency, and watched.

Such a request is announced before it arrives, by an id that cannot be guessed, so no client can
cause pages to be dropped. Its pages leave the GPU in the way in which vLLM's coordinator drops them
when the pool reuses them; no other page is touched. Engine thread only. Judges no tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from hisparsed.engine.messages import CanaryCall, CanaryReport

_STATES = ("full", "mixed", "none")
_MOST_CALLS = 4
"""Announced at the same time; one that never arrived is replaced by a new one."""


class ResidentManager(Protocol):
    """The methods that are needed of a resident manager."""

    def residency(self, request_id: str) -> str: ...


@dataclass
class _Watched:
    call: CanaryCall
    decode_steps: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_STATES, 0))
    scheduled_tokens: int = 0
    step_s: float = 0.0


class CanaryCalls:
    """``coordinator`` is vLLM's HiSparse coordinator; ``gpu_pool`` holds indexer pages."""

    def __init__(
        self,
        coordinator: Any,
        resident: Sequence[ResidentManager],
        gpu_pool: Any,
        indexer_group: int,
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._coordinator = coordinator
        self._resident = resident
        self._gpu_pool = gpu_pool
        self._indexer_group = indexer_group
        self._clock_s = clock_s
        self._calls: dict[str, _Watched] = {}
        self._step: tuple[float, dict[str, float]] | None = None

    def begin(self, call: CanaryCall) -> None:
        """Announce a request; vLLM may lengthen its id."""
        while len(self._calls) >= _MOST_CALLS:
            del self._calls[next(iter(self._calls))]
        self._calls[call.request_id] = _Watched(call)

    def end(self, request_id: str) -> CanaryReport:
        """The observations of an announced request. Raises ``ValueError`` for any other."""
        watched = self._calls.pop(request_id, None)
        if watched is None:
            raise ValueError(f"no canary call {request_id!r} was announced, or it was forgotten")
        return CanaryReport(
            **watched.decode_steps,
            scheduled_tokens=watched.scheduled_tokens,
            step_s=watched.step_s,
        )

    def owns(self, request_id: str) -> bool:
        return self._find(request_id) is not None

    def _find(self, request_id: str) -> _Watched | None:
        for announced, watched in self._calls.items():
            if request_id.startswith(announced):
                return watched
        return None

    # --- called by the scheduler ------------------------------------------------------

    def added(self, request: Any) -> bool:
        """A request arrived; returns whether the canary announced it. Its prefix is then read from
        where its residency says."""
        watched = self._find(request.request_id)
        if watched is None:
            return False
        if watched.call.residency == "none":
            self._forget_indexer_pages(request.block_hashes)
        return True

    def _forget_indexer_pages(self, hashes: Sequence[Any]) -> None:
        """Idle indexer pages of the prefix leave the GPU's cache, so that chunks are loaded."""
        pool = self._gpu_pool
        for block_hash in hashes:
            key = make_block_hash_with_group_id(block_hash, self._indexer_group)
            while (block := pool.cached_block_hash_to_block.get_one_block(key)) is not None:
                if block.ref_cnt:
                    break
                pool.evict_blocks({block.block_id})

    def before_schedule(self, running: Sequence[Any], waiting: Any) -> None:
        """The canary's requests wait behind all others, and lose the pages that they should not
        have."""
        if not self._calls:
            return
        if len(waiting) > 1 and self.owns(waiting.peek_request().request_id):
            waiting.add_request(waiting.pop_request())
        for request in running:
            watched = self._find(request.request_id)
            if watched is not None and request.num_output_tokens:
                self._drop_pages(request.request_id, watched.call.residency)

    def _drop_pages(self, request_id: str, residency: str) -> None:
        if residency == "full":
            return
        coordinator = self._coordinator
        if not coordinator._can_read_from_host(request_id):
            for manager in coordinator.hot_managers:
                manager.require_hot(request_id)
            return
        state = coordinator.request_states.get(request_id)
        if state is None:
            return
        coordinator._unpin_clean_pages(request_id, state)
        for page in sorted(state.unpinned_pages):
            if residency == "none" or page % 2:
                coordinator._lose_page(request_id, page)

    def after_schedule(self, running: Sequence[Any], tokens: Mapping[str, int]) -> None:
        """``tokens`` of each request in the step that begins now."""
        self._step = None
        if not self._calls:
            return
        total, shares = sum(tokens.values()), {}
        for request in running:
            watched = self._find(request.request_id)
            scheduled = tokens.get(request.request_id, 0)
            if watched is None or not scheduled:
                continue
            watched.scheduled_tokens += scheduled
            shares[watched.call.request_id] = scheduled / total
            if request.num_output_tokens:
                states = {one.residency(request.request_id) for one in self._resident}
                watched.decode_steps[states.pop() if len(states) == 1 else "mixed"] += 1
        if shares:
            self._step = self._clock_s(), shares

    def output_taken(self) -> None:
        """The step has ended; its time is divided by tokens."""
        if self._step is None:
            return
        began_s, shares = self._step
        self._step = None
        elapsed_s = self._clock_s() - began_s
        for announced, share in shares.items():
            if announced in self._calls:
                self._calls[announced].step_s += share * elapsed_s
