"""What vLLM's GPU worker can be asked about hot buffers: its ``worker_extension_cls``.

vLLM mixes it into the worker class; calls come through ``collective_rpc``, between steps. Every
rank does the same, and answers what it did.
"""

from __future__ import annotations

from typing import Any

import torch

from hisparsed.engine.cuda.residency.install import installed
from hisparsed.engine.cuda.residency.node import WorkerResidency


class HotExtension:
    """Methods of a worker; ``model_runner`` is vLLM's."""

    model_runner: Any

    def hisparsed_hot_figures(self) -> dict[str, Any] | None:
        """The newest figures that are there; waits for no step."""
        return installed().report(self.model_runner.req_states.req_id_to_index)

    def hisparsed_resize_hot(self, leases: dict[str, int]) -> tuple[int, int]:
        """Shrink hot buffers to so many blocks of each hot group; requests shrunk, rows moved.

        The worker's block tables end there afterwards, so that blocks leased later follow. Where
        it raises, some may be shrunk: no further step is served.
        """
        node = installed()
        try:
            return self._resize_hot(node, leases)
        except Exception as error:
            node.doubt(f"shrinking hot buffers failed: {error}")
            raise

    def hisparsed_doubt_hot(self, reason: str) -> None:
        """Let no further step be served, which ends the engine."""
        installed().doubt(reason)

    def _resize_hot(self, node: WorkerResidency, leases: dict[str, int]) -> tuple[int, int]:
        runner = self.model_runner
        row_of = runner.req_states.req_id_to_index
        tables = runner.block_tables
        groups = hot_cache_groups(runner.kv_cache_config)
        # KV caches may be tensors for inference only, and worker calls come outside of it.
        with torch.inference_mode():
            moved = node.resize(
                leases, row_of, [tables.block_tables[group].gpu for group in groups]
            )
        rows = [(row_of[name], blocks) for name, blocks in leases.items() if name in row_of]
        for row, blocks in rows:
            for group in groups:
                held = tables.num_blocks.np[group, row]
                tables.num_blocks.np[group, row] = min(held, blocks)
        return len(rows), moved


def hot_cache_groups(kv_cache_config: Any) -> list[int]:
    """Ids of the cache groups that hold hot buffers, in vLLM's order."""
    from vllm.v1.kv_cache_interface import HiSparseHotSpec

    return [
        group_id
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        if isinstance(group.kv_cache_spec, HiSparseHotSpec)
    ]
