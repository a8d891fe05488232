"""What a step costs on the described node: a roofline with named efficiencies, pure.

Computing and memory traffic overlap, so the longer of them counts; launches and the row reads
that attention waits for come on top. A node scaled to a part stands for the whole, so its work
is multiplied by what it stands for.
"""

from __future__ import annotations

from dataclasses import dataclass

from hisparsed.config.node_description import NodeDescription


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computes and moves, on the scaled node."""

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
    """Of those, rows that come from the host; each has a part in every layer."""
    requests: int = 0
    """Requests of the step; each draft pass after the first computes a token of each."""
    staged_rows: float = 0.0
    """Rows that prefill chunks read from the host; each has a part in every layer too."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step; ``total_s`` is how long it takes."""

    compute_s: float
    memory_s: float
    gather_s: float
    """Row reads over PCIe, before overlap."""
    draft_s: float
    """Passes of the drafting layer."""
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
        self._overhead_s = speed.step_overhead_ms / 1e3
        self._drafts = node.engine.speculative_tokens
        self._draft_overhead_s = speed.draft_overhead_ms / 1e3
        self._layers = model.layers
        self._topk = model.topk

    def step(self, work: StepWork) -> StepTime:
        """Time of one step that computes ``work``."""
        compute_s, memory_s = self._model_pass(work)
        gather_s = self.gather_bytes(work) * self._stands_for / self._row_read_s
        draft_s = self._draft_s(work, max(compute_s, memory_s))
        total_s = max(compute_s, memory_s) + self._overhead_s + gather_s * self._exposed + draft_s
        return StepTime(compute_s, memory_s, gather_s, draft_s, total_s)

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
        draft, and over one token a request for each further one."""
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
        return (work.loaded_rows + work.staged_rows) * self._row_bytes

    def loaded_bytes(self, work: StepWork) -> float:
        """Of those, bytes that the resolvers count: what decode steps miss."""
        return work.loaded_rows * self._row_bytes

    def to_gpu_s(self, bytes_: float) -> float:
        """Time of a bulk copy to every GPU: each reads it whole, so all share the host's memory."""
        return bytes_ * self._stands_for / self._to_gpu_s

    def to_host_s(self, bytes_: float) -> float:
        """Time of a bulk copy to the host: all GPUs hold the same, so one writes and none shares.

        With HiSparse, stock vLLM lets each GPU write a copy of the indexer of its own; that they
        share the host's memory is left out.
        """
        return bytes_ * self._stands_for / self._to_host_s
