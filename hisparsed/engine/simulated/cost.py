"""The cost model of the simulated node: virtual time, seconds of a step, rows that miss.

``CostModel`` is a roofline of the described node with named efficiencies. Computing and memory
traffic overlap, so the longer of them counts; launches and the row reads that attention waits
for come on top. The engine core's CPU runs next to all of it where batches are scheduled ahead.
A node scaled to a part stands for the whole, so its work is multiplied by what
it stands for.

``RowModel`` says how many rows a decode step selects and how many of them miss, by a curve over
hot rows / selected rows, published for single rows and replaceable in the node's description.
Selection is taken to be even over the pages of a context, so rows of resident pages miss nothing
and leave the hot buffer to the others. Virtual time moves only on request. All of it is
pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hisparsed.config.node_description import NodeDescription

START_UNIX_S = 1_767_225_600.0
"""Every simulation begins at the start of 2026, so that equal runs leave equal journals."""


class VirtualClock:
    """Seconds since the simulation began."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return START_UNIX_S + self._now_s

    def advance(self, seconds: float) -> None:
        """Raises ``ValueError`` for a step back."""
        if seconds < 0:
            raise ValueError(f"virtual time cannot go back by {-seconds} s")
        self._now_s += seconds

    def advance_to(self, at_s: float) -> None:
        """Go to ``at_s``; a time that has passed changes nothing."""
        self._now_s = max(self._now_s, at_s)


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Distinct rows of one index group that one request's step selects, by where they were."""

    selected: float
    resident: float
    hits: float
    loads: float
    """Read from the host and kept."""
    spills: float
    """Read from the host for this step only: they do not fit the hot buffer."""


NO_ROWS = RowCounts(0.0, 0.0, 0.0, 0.0, 0.0)


class RowModel:
    """``miss_curve`` [(hot rows / selected rows, misses)], ``union`` distinct rows / top-k."""

    def __init__(
        self, topk: int, miss_curve: Sequence[tuple[float, float]], union: Sequence[float]
    ) -> None:
        self.topk = topk
        self._curve = tuple(miss_curve)
        self._union = tuple(union)

    def selected(self, context: int, rows: int) -> float:
        """Distinct tokens that ``rows`` neighbouring rows select of ``context``."""
        return min(float(context), self.topk * self._union[min(rows, len(self._union)) - 1])

    def misses(self, ratio: float) -> float:
        """Share of selected rows that miss at ``ratio`` hot rows a selected row."""
        first, last = self._curve[0], self._curve[-1]
        if ratio <= first[0]:
            # Nothing hits without a buffer.
            return 1.0 - (1.0 - first[1]) * max(0.0, ratio) / first[0]
        if ratio >= last[0]:
            return last[1]
        for (low, high_miss), (high, low_miss) in zip(self._curve, self._curve[1:], strict=False):
            if ratio <= high:
                part = math.log(ratio / low) / math.log(high / low)
                return high_miss + (low_miss - high_miss) * part
        raise AssertionError("the curve ends above every ratio that comes here")

    def step(
        self,
        context: int,
        rows: int,
        resident_share: float,
        hot_rows: int,
        locality: float = 1.0,
    ) -> RowCounts:
        """One decode step of a request with ``hot_rows`` in its hot buffer a group.

        It misses as one of the mean with ``locality`` times the buffer.
        """
        selected = self.selected(context, rows)
        resident = selected * resident_share
        from_host = selected - resident
        # A buffer as large as all of the context's host pages misses nothing once it is warm.
        if from_host <= 0 or hot_rows >= context * (1 - resident_share):
            return RowCounts(selected, resident, from_host, 0.0, 0.0)
        missing = from_host * self.misses(locality * hot_rows / from_host)
        spills = min(missing, max(0.0, from_host - hot_rows))
        return RowCounts(selected, resident, from_host - missing, missing - spills, spills)


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step on the scaled node: tokens computed and rows moved."""

    tokens: int = 0
    """Rows through the model: prefill tokens, decode tokens and drafts."""
    context_tokens: float = 0.0
    """Sum over those rows of the tokens that the indexer scores for each."""
    selected_rows: float = 0.0
    """Sum over those rows of the KV rows that attention reads."""
    decode_context_tokens: float = 0.0
    """Sum over decoding requests of the indexer rows that a step reads."""
    decode_selected_rows: float = 0.0
    """Sum over decoding requests of the distinct KV rows that a step reads."""
    loaded_rows: float = 0.0
    """Rows of these that come from the host; each has a part in every layer."""
    requests: int = 0
    """Requests of the step; each draft pass after the first computes a token of each."""
    staged_rows: float = 0.0
    """Rows that prefill chunks read from the host; each has a part in every layer too."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step; ``total_s`` is how long it takes, the engine core included."""

    compute_s: float
    memory_s: float
    gather_s: float
    """Row reads over PCIe, before overlap."""
    draft_s: float
    """Passes of the drafting layer."""
    core_s: float
    """CPU time of the engine core."""
    total_s: float


class CostModel:
    """``stands_for``: how many nodes of this size make the described one."""

    def __init__(self, node: NodeDescription, stands_for: float = 1.0) -> None:
        model, gpu, speed = node.model, node.gpu, node.speed
        index_groups = len(model.index_leaders())
        self._stands_for = stands_for
        self._miss_of_expert = 1 - model.experts_per_token / model.experts
        self._routed = model.routed_params
        self._other = model.other_params
        active = model.routed_params * model.experts_per_token / model.experts + self._other
        self._flops_token = 2 * active
        self._flops_scored = 2 * model.index_heads * model.index_dim * index_groups
        self._flops_row = 2 * model.heads * model.row_values * model.layers
        self._flops_s = gpu.count * gpu.fp8_tflops * 1e12 * speed.prefill_efficiency
        self._memory_s = gpu.memory_bandwidth * speed.decode_efficiency
        self._gpus = gpu.count
        self._index_bytes = model.index_row_bytes * index_groups
        self._row_bytes = model.row_bytes * model.layers
        self._row_read_s = min(gpu.row_read_bandwidth, node.host.memory_bandwidth / gpu.count)
        self._to_gpu_s = float(min(gpu.copy_bandwidth, node.host.memory_bandwidth / gpu.count))
        self._to_host_s = float(min(gpu.copy_bandwidth, node.host.memory_bandwidth))
        self._exposed = 1 - speed.gather_overlap
        self._prefill_reads = speed.prefill_reads
        self._overhead_s = speed.step_overhead_ms / 1e3
        self._core = node.core
        self._schedules_ahead = node.engine.concurrent_batches > 1
        self._drafts = node.engine.speculative_tokens
        self._draft_overhead_s = speed.draft_overhead_ms / 1e3
        self._layers = model.layers
        self._topk = model.topk

    def step(self, work: StepWork) -> StepTime:
        """Time of one step that computes ``work``."""
        compute_s, memory_s = self._model_pass(work)
        gather_s = self.gather_bytes(work) * self._stands_for / self._row_read_s
        draft_s = self._draft_s(work, max(compute_s, memory_s))
        gpu_s = max(compute_s, memory_s) + self._overhead_s + gather_s * self._exposed + draft_s
        core_s = self._core_s(work)
        total_s = max(gpu_s, core_s) if self._schedules_ahead else gpu_s + core_s
        return StepTime(compute_s, memory_s, gather_s, draft_s, core_s, total_s)

    def _core_s(self, work: StepWork) -> float:
        core, many = self._core, self._stands_for
        requests_s = work.requests * many * core.request_ms / 1e3
        return core.step_ms / 1e3 + requests_s + work.tokens * many * core.token_us / 1e6

    def _model_pass(self, work: StepWork) -> tuple[float, float]:
        """Seconds of computing and of memory traffic through all layers."""
        many = self._stands_for
        tokens = work.tokens * many
        flops = (
            tokens * self._flops_token
            + work.context_tokens * many * self._flops_scored
            + work.selected_rows * many * self._flops_row
        )
        weights = self._other + self._routed * (1 - self._miss_of_expert**tokens)
        # Every GPU reads all KV of its requests: latent rows have no heads to split.
        kv_bytes = many * (
            work.decode_context_tokens * self._index_bytes
            + work.decode_selected_rows * self._row_bytes
        )
        return flops / self._flops_s, (weights / self._gpus + kv_bytes) / self._memory_s

    def _draft_s(self, work: StepWork, step_s: float) -> float:
        """Multi-token prediction: one layer drafts, once over the step's tokens for the first
        draft, and over one token per request for each further one."""
        if not self._drafts:
            return 0.0
        rows = min(float(work.requests * self._topk), work.decode_selected_rows)
        further = StepWork(
            tokens=work.requests,
            context_tokens=work.decode_context_tokens,
            selected_rows=rows,
            decode_context_tokens=work.decode_context_tokens,
            decode_selected_rows=rows,
        )
        passes_s = step_s + (self._drafts - 1) * max(self._model_pass(further))
        return passes_s / self._layers + self._drafts * self._draft_overhead_s

    def gather_bytes(self, work: StepWork) -> float:
        """Bytes of row reads on each GPU, of the scaled node."""
        staged = work.staged_rows * self._prefill_reads
        return (work.loaded_rows + staged) * self._row_bytes

    def loaded_bytes(self, work: StepWork) -> float:
        """Bytes of these that the resolvers count: the misses of decode steps."""
        return work.loaded_rows * self._row_bytes

    def to_gpu_s(self, bytes_: float) -> float:
        """Time of a bulk copy to every GPU: each reads it whole, so all share the host's memory."""
        return bytes_ * self._stands_for / self._to_gpu_s

    def to_host_s(self, bytes_: float) -> float:
        """Time of a bulk copy to the host: all GPUs hold the same, so one writes and none shares.

        With HiSparse, stock vLLM lets each GPU write its own copy of the indexer; that these writes
        share the host's memory bandwidth is ignored.
        """
        return bytes_ * self._stands_for / self._to_host_s
