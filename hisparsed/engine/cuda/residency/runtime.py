"""Our resolver behind vLLM's HiSparse runtimes in the GPU worker.

``ResolvedRuntime`` replaces the methods that touch replacement state, no more; streams, events
and the order of copies stay vLLM's. ``install`` re-classes the live runtimes of this worker once
vLLM has bound their memories, before graphs are captured. It reads vLLM's own objects for every
size and address, and refuses what the kernels cannot do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.hisparse.runtime import HiSparseRuntime

from hisparsed.engine.compat.adapters import resident_by_state
from hisparsed.engine.cuda.residency.group import GroupRows, LayerRows, StepLists
from hisparsed.engine.cuda.residency.worker import WorkerResidency
from hisparsed.kernels.api import Geometry, StateBank, state_bytes
from hisparsed.kernels.backends import pick


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


_installed: list[WorkerResidency] = []
"""The one of this process: a GPU worker is its own process."""


def installed() -> WorkerResidency:
    """This process's. Raises ``RuntimeError`` where there is none."""
    if not _installed:
        raise RuntimeError("this worker runs vLLM's own HiSparse kernels")
    return _installed[0]


def install(
    handles: Sequence[Any], hot_group_of: Sequence[int], *, scratch: Sequence[int] = ()
) -> WorkerResidency:
    """``handles``: vLLM's cache handles, bound; ``hot_group_of``: the hot group of each.

    ``scratch``: GPU blocks for rows that do not fit their lease. Raises ``RuntimeError`` where
    Triton or GPU memory is missing, ``ValueError`` on sizes that cannot be.
    """
    leaders = [handle for handle in handles if handle.runtime.is_group_leader]
    first = leaders[0].runtime
    device = first.hot.cache.device
    if device.type == "cuda":
        pick("triton", device)
    source_table = leaders[0].source_block_table
    block_size = int(first.hot.block_size)
    sizes = (
        len(leaders),
        int(first.max_num_reqs),
        int(first.hot_block_table.shape[1]) * block_size,
        int(source_table.shape[1]) * block_size,
    )
    rows, topk = first.index_group.shared_topk.physical_topk_indices.shape
    _require_memory(sum(state_bytes(*sizes, rows=rows, topk=topk)), device)
    bank = StateBank.create(*sizes, device=device)
    blocks = torch.tensor(list(scratch), dtype=torch.int32, device=device)
    _require_scratch(first, blocks.shape[0] * block_size, sizes[2])
    lists = StepLists.create(rows, topk, device)
    runtime_group = dict(zip(map(_runtime_id, handles), hot_group_of, strict=True))
    members = [[leader.runtime, *leader.runtime.index_group.followers] for leader in leaders]
    groups = [
        _group(bank.states[index], leader, runtimes, lists, runtime_group, blocks)
        for index, (leader, runtimes) in enumerate(zip(leaders, members, strict=True))
    ]
    node = WorkerResidency(bank, groups, block_size)
    for group, runtimes in zip(groups, members, strict=True):
        for layer, runtime in enumerate(runtimes):
            runtime.__class__ = ResolvedRuntime
            runtime.use(node, group, layer, source_table)
    # vLLM may have made its tensors for inference only, and those change in no other mode.
    with torch.inference_mode():
        _warm_up(leaders)
    _installed[:] = [node]
    return node


def _runtime_id(handle: Any) -> int:
    return id(handle.runtime)


def _group(
    state: Any,
    leader: Any,
    runtimes: Sequence[Any],
    lists: StepLists,
    runtime_group: dict[int, int],
    scratch: torch.Tensor,
) -> GroupRows:
    first = leader.runtime
    shared, cache = first.index_group.shared_topk, first.hot.cache
    block_size = int(first.hot.block_size)
    geometry = Geometry(
        block_size=block_size,
        attention_block_stride=int(first.hot.attention_block_stride),
        slab_blocks=int(cache.shape[0]),
        host_blocks=int(first.host_cache.shape[0]) // block_size,
        resident_by_state=resident_by_state(leader),
    )
    return GroupRows(
        state,
        geometry,
        [LayerRows.of(runtime.hot.cache, runtime.host_cache) for runtime in runtimes],
        lists,
        attention_indices=shared.physical_topk_indices,
        valid_counts=shared.valid_topk_counts,
        swap_counts=shared.swap_counts,
        hot_group=runtime_group[id(first)],
        scratch=scratch if scratch.numel() else None,
    )


def _require_memory(needed: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    if needed > free:
        raise RuntimeError(
            f"hot buffers need {needed / 2**20:.0f} MiB of GPU memory in addition to the KV "
            f"blocks, and "
            f"{free / 2**20:.0f} MiB are free; lower gpu_memory_utilization or max_num_seqs, or "
            "set cuda.kernels: vllm"
        )


def _require_scratch(runtime: Any, scratch_rows: int, most_rows: int) -> None:
    """A captured graph cannot take turns, so scratch holds the worst step of all requests."""
    topk = int(runtime.index_group.shared_topk.physical_topk_indices.shape[1])
    worst = int(runtime.max_num_reqs) * max(0, int(runtime.max_union_rows) - topk)
    if scratch_rows and scratch_rows < worst:
        raise ValueError(
            f"scratch has {scratch_rows} rows, and {runtime.max_num_reqs} requests may need "
            f"{worst} in one step; give as many, or none"
        )
    if most_rows < int(runtime.max_union_rows) and not scratch_rows:
        raise ValueError(
            f"the largest hot lease has {most_rows} rows, fewer than the "
            f"{runtime.max_union_rows} that one step of a request may select"
        )


def _warm_up(leaders: Sequence[Any]) -> None:
    """Compile and allocate all that a captured step will use: a full step of padding."""
    for leader in leaders:
        runtime = leader.runtime
        topk = runtime.index_group.shared_topk.device_topk_rows
        rows = topk.shape[0]
        runtime._resolve_residency(
            resident=leader,
            req_id_per_token=torch.full((rows,), -1, dtype=torch.int32, device=topk.device),
            block_table=leader.source_block_table,
            topk_indices=topk.fill_(-1),
            block_size=runtime.hot.block_size,
            shared_rows=slice(0, rows),
        )
        for member in (runtime, *runtime.index_group.followers):
            member._swap_rows(slice(0, rows))
