"""The calls that a node serves with hot buffers of one size, in closed form: no scheduler, no
clock.

A steady state of the simulated node's cost model: so many calls at a time, without pauses, each
with a prompt whose beginning is found on the host, or of which nothing is found, and an answer.
The number that runs at a time follows from the GPU blocks that each holds; steps with and without
prefill follow from that. Constants are those of the node description and of vLLM's layout.

Not here: queues that grow and shrink, whole numbers of calls at a time, copies that share the
link with row reads, and what host memory loses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from hisparsed.config.node_description import NodeDescription
from hisparsed.engine.scratch import scratch_block_count
from hisparsed.engine.simulated.cost import CostModel, RowModel, StepWork
from hisparsed.plan.layout import TAIL_PAGES, real_layout
from hisparsed.simulate.scenario import varied
from hisparsed.simulate.workload import LATER_TOKENS

_PARTS = 1024
"""The cost model counts whole tokens and requests; here they are means, in parts of one."""
_LOCALITIES = 8
"""Kinds of requests that stand for all where requests differ."""
_NO_LEASE_SHARE = 10
"""vLLM's transition watermark is at least one block in this many."""


def variant(
    node: NodeDescription,
    *,
    drafts: int,
    hidden: float,
    misses: float = 1.0,
    spread: float | None = None,
) -> NodeDescription:
    """``node`` with other drafts, row reads hidden by computing, and misses."""
    changed = varied(node, misses=misses, union=1.0, spread=spread)
    engine = changed.engine.model_copy(update={"speculative_tokens": drafts})
    speed = changed.speed.model_copy(update={"gather_overlap": hidden})
    return changed.model_copy(update={"engine": engine, "speed": speed})


@dataclass(frozen=True, slots=True)
class Traffic:
    """Calls without pauses, all alike; tokens."""

    context: int
    """Of a prompt."""
    answer: int
    first: float
    """Share of the calls of whose prompt no cache holds anything; of the others it holds all
    but ``LATER_TOKENS``."""
    users: int
    """Calls at a time, running or waiting."""


@dataclass(frozen=True, slots=True)
class Steady:
    """A node under constant traffic, in means over its steps."""

    running: int
    decoding: float
    """Running requests that decode in a step."""
    leased: bool
    """Whether requests have hot buffers: not where all their pages fit the GPU."""
    free_blocks: int
    """GPU blocks that running requests do not hold; they keep resident pages."""
    held_blocks: int
    """Of one running request."""
    step_s: float
    prefill_share: float
    """Of the steps, those that compute prompts."""
    decode_step_s: float
    """A step that computes none."""
    step_tokens: float
    loaded_bytes: float
    """Rows that decoding requests miss in a step, on each link."""
    from_host_rows: float
    """Distinct rows that one request's step selects from the host."""
    missed_rows: float
    """Rows of these that its hot buffer does not hold."""
    resident_rows: float
    calls_per_s: float
    core_s: float
    """CPU time of the engine core in a step without prefill."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Chunks of prompts, ``count`` of them a call, by their mean."""

    count: float
    tokens: float
    end: float
    staged: float


@dataclass(frozen=True, slots=True)
class _Decode:
    """One step of one request, by its mean."""

    length: float
    selected: float
    resident: float
    missed: float
    """Loads and spills."""


class ClosedForm:
    """One node description."""

    def __init__(self, node: NodeDescription) -> None:
        engine, model = node.engine, node.model
        self.node = node
        self.layout = real_layout(node, 1)
        self._cost = CostModel(node, 1 / _PARTS)
        self._rows = RowModel(model.topk, node.rows.miss_curve, node.rows.union)
        self.localities = _localities(node.rows.spread)
        scratch = scratch_block_count(
            query_len=node.query_len,
            topk=model.topk,
            block_tokens=engine.block_tokens,
            max_num_seqs=engine.max_num_seqs,
        )
        # One block more is vLLM's null block.
        self.gpu_blocks = self.layout.gpu_blocks - scratch - 1
        accepted = node.speed.acceptance[: engine.speculative_tokens]
        self.tokens_per_step = 1 + sum(
            math.prod(accepted[: count + 1]) for count in range(len(accepted))
        )

    def steady(
        self, traffic: Traffic, multiplier: float, rows: Sequence[float] | None = None
    ) -> Steady | None:
        """``None`` where not one call fits.

        ``rows`` are hot rows of each of ``localities`` instead of the multiplier's.
        """
        node, layout = self.node, self.layout
        query, budget = node.query_len, node.engine.max_num_batched_tokens
        length = traffic.context + traffic.answer / 2
        pages = layout.pages(math.ceil(length))
        hot = layout.hot_blocks(round(multiplier * layout.topk))
        tail = layout.hot_groups * TAIL_PAGES
        computed = traffic.context if traffic.first else LATER_TOKENS
        window = layout.hot_groups * layout.pages(min(computed, budget))
        everybody = min(traffic.users, node.engine.max_num_seqs)
        resident = everybody * pages * (1 + layout.hot_groups) + window
        leased = resident > self.gpu_blocks - max(hot, self.gpu_blocks // _NO_LEASE_SHARE)
        held = pages + tail + hot if leased else pages * (1 + layout.hot_groups)
        running = min(everybody, (self.gpu_blocks - window) // held)
        if running < 1:
            return None
        free = self.gpu_blocks - window - running * held
        on_gpu = min(1.0, (tail + free / running) / (layout.hot_groups * pages)) if leased else 1.0
        decode = self._decode(length, on_gpu, rows or [multiplier * layout.topk])
        chunks = _chunks(traffic, budget - running * query, on_gpu)
        prefill_steps = sum(one.count for one in chunks)
        prompt = sum(one.count * one.tokens for one in chunks)
        decode_steps = (traffic.answer - 1) / self.tokens_per_step
        steps = max((prefill_steps + decode_steps) / running, prompt / (budget - running * query))
        decoding = decode_steps / steps
        core_s, decode_step_s = self._step(decode, decoding, [])
        if prefill_steps > steps:
            # More chunks than steps: each step computes several.
            merged = [replace(one, count=one.count / steps) for one in chunks]
            step_s, share = self._step(decode, decoding, merged)[1], 1.0
        else:
            share = prefill_steps / steps
            step_s = (1 - share) * decode_step_s + sum(
                one.count / steps * self._step(decode, decoding, [replace(one, count=1.0)])[1]
                for one in chunks
            )
        loaded = StepWork(loaded_rows=decoding * decode.missed)
        return Steady(
            running=running,
            decoding=decoding,
            leased=leased,
            free_blocks=free,
            held_blocks=held,
            step_s=step_s,
            prefill_share=share,
            decode_step_s=decode_step_s,
            step_tokens=prompt / steps + decoding * query,
            loaded_bytes=self._cost.loaded_bytes(loaded),
            from_host_rows=decode.selected - decode.resident,
            missed_rows=decode.missed,
            resident_rows=decode.resident,
            calls_per_s=1 / (steps * step_s),
            core_s=core_s,
        )

    def misses(self, steady: Steady, rows: float, locality: float = 1.0) -> float:
        """Share of the rows from the host that a request misses with this many hot rows."""
        return self._rows.misses(locality * rows / max(1.0, steady.from_host_rows))

    def _decode(self, length: float, on_gpu: float, rows: Sequence[float]) -> _Decode:
        every = list(rows) if len(rows) > 1 else list(rows) * len(self.localities)
        found = [
            self._rows.step(round(length), self.node.query_len, on_gpu, round(hot), locality)
            for hot, locality in zip(every, self.localities, strict=True)
        ]
        missed = sum(one.loads + one.spills for one in found) / len(found)
        return _Decode(length, found[0].selected, found[0].resident, missed)

    def _step(
        self, decode: _Decode, decoding: float, chunks: Sequence[_Chunk]
    ) -> tuple[float, float]:
        """Seconds of the engine core, and of one step."""
        query, topk = self.node.query_len, self.node.model.topk
        prompt = sum(one.count * one.tokens for one in chunks)
        tokens = decoding * query + prompt
        scored = sum(one.count * one.tokens * (one.end - one.tokens / 2) for one in chunks)
        read = sum(one.count * one.tokens * min(one.end, topk) for one in chunks)
        requests = decoding + sum(one.count for one in chunks)
        work = StepWork(
            tokens=round(tokens * _PARTS),
            context_tokens=_PARTS * (decoding * query * (decode.length - query / 2) + scored),
            selected_rows=_PARTS * (decoding * query * min(decode.length, topk) + read),
            decode_context_tokens=_PARTS * decoding * decode.length,
            decode_selected_rows=_PARTS * decoding * decode.selected,
            loaded_rows=_PARTS * decoding * decode.missed,
            requests=round(requests * _PARTS),
            staged_rows=_PARTS * sum(one.count * one.staged for one in chunks),
        )
        time = self._cost.step(work)
        return time.core_s, time.total_s


def _chunks(traffic: Traffic, room: int, on_gpu: float) -> list[_Chunk]:
    """The prompt tokens of a call, in chunks of at most ``room`` tokens."""
    found = []
    later = min(LATER_TOKENS, traffic.context)
    for share, fresh in ((1 - traffic.first, later), (traffic.first, traffic.context)):
        if not share:
            continue
        start, whole = traffic.context - fresh, fresh // room
        ends = [start + (one + 1) * room for one in range(whole)]
        if whole:
            staged = sum(_staged(end - room, end, on_gpu) for end in ends) / whole
            found.append(_Chunk(share * whole, room, sum(ends) / whole, staged))
        rest = fresh - whole * room
        if rest:
            end = traffic.context
            found.append(_Chunk(share, rest, end, _staged(end - rest, end, on_gpu)))
    return found


def _staged(start: int, end: int, on_gpu: float) -> float:
    """As the simulated node stages: all of a chunk's context that is not on the GPU."""
    return min(float(start), end * (1 - on_gpu))


@lru_cache
def _localities(spread: float) -> tuple[float, ...]:
    """Means of even parts of what the simulated node draws."""
    if not spread:
        return (1.0,)
    middles = [(2 * one + 1) / _LOCALITIES - 1 for one in range(_LOCALITIES)]
    return tuple((1 + spread) ** middle for middle in middles)
