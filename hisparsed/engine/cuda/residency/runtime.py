"""vLLM's HiSparse runtime with our resolver: the methods that touch replacement state, no more.

Live runtimes are re-classed after vLLM has bound their memories, before graphs are captured.
Streams, events and the order of copies stay vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.hisparse.runtime import HiSparseRuntime

from hisparsed.engine.cuda.residency.group import GroupRows
from hisparsed.engine.cuda.residency.node import WorkerResidency


class ResolvedRuntime(HiSparseRuntime):  # type: ignore[misc]
    """One layer's data plane. Its group's resolve is called on the leader."""

    def use(
        self, node: WorkerResidency, group: GroupRows, layer: int, source_table: torch.Tensor
    ) -> None:
        """``layer``: which of the group's; ``source_table`` int32 [N, pages] by batch row."""
        self.residency_node = node
        self.residency_group = group
        self.residency_layer = layer
        self.residency_source = source_table

    def _resolve_residency(
        self,
        *,
        resident: Any = None,
        req_id_per_token: torch.Tensor,
        block_table: torch.Tensor,
        topk_indices: torch.Tensor,
        block_size: int,
        return_valid_counts: bool = False,
        shared_rows: slice,
        attention_indices_out: torch.Tensor | None = None,
        valid_counts_out: torch.Tensor | None = None,
    ) -> None:
        """Valid counts are always written: they cost nothing here."""
        if resident is None or self.request_state_indices is None:
            raise RuntimeError("vLLM resolves without resident pages or request states")
        found = self.residency_group.resolve(
            topk_indices,
            req_id_per_token[: topk_indices.shape[0]],
            self.request_state_indices,
            block_table,
            resident.block_table,
            self.hot_block_table,
            shared_rows,
        )
        if attention_indices_out is not None:
            attention_indices_out.copy_(found.attention_indices)
        if valid_counts_out is not None:
            valid_counts_out.copy_(found.valid_counts)

    def _swap_rows(self, shared_rows: slice) -> None:
        self.residency_group.fetch(self.residency_layer, shared_rows)

    def reset_hot_state(self) -> None:
        self.residency_node.forget_all()

    def invalidate_sorted_slots(
        self, sorted_slots: torch.Tensor, state_indices: torch.Tensor
    ) -> None:
        """Nothing to do: rows are known by a request's own positions, and a host block that is
        used again comes to a new request, whose state row begins empty, or to new positions."""

    def invalidate_written_slots(
        self, written_slots: torch.Tensor, req_id_per_token: torch.Tensor
    ) -> None:
        tokens = min(written_slots.numel(), req_id_per_token.numel())
        if tokens and self.request_state_indices is not None:
            self.residency_node.written(
                written_slots[:tokens],
                req_id_per_token[:tokens],
                self.request_state_indices,
                self.residency_source,
            )
