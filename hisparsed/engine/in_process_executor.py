"""Answers vLLM's questions to an executor in the engine core's process, without GPU workers.

The part of the contract that the reference and simulated nodes answer alike: layers and the pages
that HiSparse plans next to them, one answer per step, and the calls that have no meaning without
workers. Computes no step and answers nothing to the control side.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.hisparse.layout import get_hisparse_kv_cache_groups
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput


@dataclass(frozen=True, slots=True)
class LayerRowSize:
    """vLLM's name for one layer's rows, and the bytes of a row: one token in that layer."""

    name: str
    row_bytes: int


class InProcessExecutor(Executor):  # type: ignore[misc]
    """Options come in ``additional_config["hisparsed"]``; ``_connectors`` is the subclass's."""

    def _init_executor(self) -> None:
        self._options: dict[str, Any] = dict(
            self.vllm_config.additional_config.get("hisparsed", {})
        )
        self._block_tokens = int(self.cache_config.block_size)

    # --- for the subclass -------------------------------------------------------------

    @abstractmethod
    def _layers(self) -> Iterator[tuple[LayerRowSize, LayerRowSize | None]]:
        """Each layer's sparse-MLA rows, and its indexer's where it leads an index group."""

    @abstractmethod
    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput | None:
        """One step; ``_answer`` makes what is returned. ``None`` if ``sample_tokens`` returns
        it."""

    @staticmethod
    def _answer(
        sampled: Mapping[str, list[int]], connector_output: KVConnectorOutput, **more: Any
    ) -> ModelRunnerOutput:
        """``sampled``: new tokens of each scheduled request; empty in steps of transfers alone.

        ``more``: other fields of ``ModelRunnerOutput``.
        """
        if not sampled:
            return ModelRunnerOutput.with_kv_conn_output_only(connector_output)
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={request_id: index for index, request_id in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=connector_output,
            **more,
        )

    # --- start-up ---------------------------------------------------------------------

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        specs: dict[str, Any] = {}
        for rows, indexer in self._layers():
            leads = indexer is not None
            specs[rows.name] = self._spec(rows, SparseCacheRole.SPARSE, leads)
            if indexer is not None:
                specs[indexer.name] = self._spec(indexer, SparseCacheRole.INDEXER, False)
        for cache_group in get_hisparse_kv_cache_groups(self.vllm_config, specs) or []:
            for name in cache_group.layer_names:
                specs.setdefault(name, cache_group.kv_cache_spec)
        return [specs]

    def _spec(self, rows: LayerRowSize, role: Any, leads: bool) -> Any:
        return MLAAttentionSpec(
            block_size=self._block_tokens,
            num_kv_heads=1,
            head_size=rows.row_bytes,
            dtype=torch.int8,
            cache_role=role,
            is_index_group_leader=leads,
        )

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["BLHNC"]]

    def set_kv_cache_layout(self, layout_name: str, cp_kv_cache_interleave_size: int = 1) -> None:
        """vLLM resolved the only layout offered; the second argument came with 0.33."""

    def compile_or_warm_up_model(self) -> None:
        """Nothing to compile."""

    def get_kv_connector_handshake_metadata(self) -> list[Any]:
        return []

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return False

    # --- steps ------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        return _at_once(self._run(scheduler_output), non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return _at_once(self._sample(grammar_output), non_block)

    def _sample(self, grammar_output: Any) -> ModelRunnerOutput:
        """The rest of a step for which ``_run`` returned ``None``."""
        raise RuntimeError(f"{type(self).__name__} samples inside execute_model")

    # --- answers of workers ----------------------------------------------------

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Worker methods have no meaning here: all answer ``None``, as from one worker."""
        return _at_once([None], non_block)

    def check_health(self) -> None:
        """Alive as long as the engine core's process is."""

    def shutdown(self) -> None:
        """vLLM also calls it where start-up failed before there were connectors."""
        connectors = getattr(self, "_connectors", None)
        if connectors is not None:
            connectors.shutdown()


def _at_once(value: Any, non_block: bool) -> Any:
    """``value``, in a future where the caller wants one."""
    if not non_block:
        return value
    future: Future[Any] = Future()
    future.set_result(value)
    return future
