"""The simulated node's executor: vLLM's executor contract with virtual time for a forward pass.

Runs in the process of the engine core, which the simulation drives step by step. Emits made-up
tokens; accepts drafts by chance, from a seed and the request's name. Not here: what a step costs
(``cost``), which rows miss (``rows``), when copies end (``copies``).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from random import Random
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.hisparse.layout import get_hisparse_kv_cache_groups
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from hisparsed.config.node_description import NodeDescription
from hisparsed.engine.request_table import HotRows
from hisparsed.engine.simulated.clock import VirtualClock
from hisparsed.engine.simulated.connectors import (
    Connectors,
    HiSparseConnectors,
    StandardConnectors,
)
from hisparsed.engine.simulated.cost import CostModel
from hisparsed.engine.simulated.rows import RowModel
from hisparsed.engine.simulated.tally import Tally
from hisparsed.engine.simulated.work import Residency, Segment, StepWorker
from hisparsed.engine.worker_report import WorkerReport
from hisparsed.plan.layout import real_layout

TOKEN = 1
"""Every token that the node makes up."""


class SimulatedExecutor(Executor):  # type: ignore[misc]
    """Options come in ``additional_config["hisparsed"]``; ``bind`` must follow construction."""

    def _init_executor(self) -> None:
        options = dict(self.vllm_config.additional_config["hisparsed"])
        self._node = NodeDescription.model_validate(options["node"])
        self._seed = int(options["seed"])
        self._stands_for = float(options["stands_for"])
        self._cost = CostModel(self._node, self._stands_for)
        self._layout = real_layout(self._node, 1)
        self._hisparse = self.vllm_config.attention_config.hisparse_config is not None
        self._block_tokens = int(self.cache_config.block_size)
        self._lengths: dict[str, int] = {}
        self._chance: dict[str, Random] = {}
        self._drafting: list[str] = []
        self.clock = VirtualClock()
        self.tally = Tally()

    # --- start-up ---------------------------------------------------------------------

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        model = self._node.model
        leaders = set(model.index_leaders())
        specs: dict[str, Any] = {}
        for layer in range(model.layers):
            leads = layer in leaders
            specs[f"layers.{layer}.mla"] = self._spec(
                model.row_bytes, SparseCacheRole.SPARSE, leads
            )
            if leads:
                specs[f"layers.{layer}.indexer"] = self._spec(
                    model.index_row_bytes, SparseCacheRole.INDEXER, False
                )
        for cache_group in get_hisparse_kv_cache_groups(self.vllm_config, specs) or []:
            for name in cache_group.layer_names:
                specs.setdefault(name, cache_group.kv_cache_spec)
        return [specs]

    def _spec(self, row_bytes: int, role: Any, leader: bool) -> Any:
        return MLAAttentionSpec(
            block_size=self._block_tokens,
            num_kv_heads=1,
            head_size=row_bytes,
            dtype=torch.int8,
            cache_role=role,
            is_index_group_leader=leader,
        )

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["BLHNC"]]

    def set_kv_cache_layout(self, layout_name: str, cp_kv_cache_interleave_size: int = 1) -> None:
        """vLLM resolved the only layout offered; the second argument came with 0.33."""

    def determine_available_memory(self) -> list[int]:
        return [self._node.gpu.kv_memory]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        config, told = kv_cache_configs[0], (self.clock, self._cost, self._layout)
        self._connectors: Connectors
        if self._hisparse:
            gpus = self._node.gpu.count
            self._connectors = HiSparseConnectors(self.vllm_config, config, *told, gpus)
        else:
            self._connectors = StandardConnectors(self.vllm_config, config, *told)

    def bind(self, residency: Residency) -> None:
        """Where to ask for resident pages and hot leases: vLLM's own managers know."""
        rows = self._node.rows
        self._work = StepWorker(
            RowModel(self._node.model.topk, rows.miss_curve, rows.union),
            residency,
            self._block_tokens,
            self._node.model.topk,
            self._locality,
        )

    def _locality(self, request_id: str) -> float:
        spread = self._node.rows.spread
        if not spread:
            return 1.0
        return float((1 + spread) ** Random(f"{self._seed} rows {request_id}").uniform(-1, 1))

    def compile_or_warm_up_model(self) -> None:
        """Nothing to compile."""

    def get_kv_connector_handshake_metadata(self) -> list[Any]:
        return []

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    # --- steps ------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        output = self._run(scheduler_output)
        if not non_block:
            return output
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(output)
        return future

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        raise RuntimeError("the simulated executor samples inside execute_model")

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        drafts = [TOKEN] * self._node.engine.speculative_tokens
        if not drafts or not self._drafting:
            return None
        return DraftTokenIds(self._drafting, [drafts for _ in self._drafting])

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.tally.preemptions += len(output.preempted_req_ids or ())
        for request_id in output.finished_req_ids:
            self._lengths.pop(request_id, None)
            self._chance.pop(request_id, None)
        self._work.forget(output.finished_req_ids)
        self._connectors.before_forward(output.kv_connector_metadata)
        segments = self._segments(output)
        if segments:
            work = self._work.of(segments, self.tally)
            time = self._cost.step(work)
            self.clock.advance(time.total_s)
            self.tally.step(work, time, self._cost.gather_bytes(work))
        connector_output = self._connectors.after_forward(output.finished_req_ids)
        if not segments:
            return ModelRunnerOutput.with_kv_conn_output_only(connector_output)
        sampled = [self._sample(segment) for segment in segments]
        self._drafting = [
            segment.request_id for segment, tokens in zip(segments, sampled, strict=True) if tokens
        ]
        return ModelRunnerOutput(
            req_ids=[segment.request_id for segment in segments],
            req_id_to_index={segment.request_id: index for index, segment in enumerate(segments)},
            sampled_token_ids=sampled,
            kv_connector_output=connector_output,
        )

    def _segments(self, output: SchedulerOutput) -> list[Segment]:
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self._lengths[new.req_id] = len(tokens)
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        drafts = output.scheduled_spec_decode_tokens
        return [
            Segment(
                request_id,
                starts[request_id],
                count,
                len(drafts.get(request_id, ())),
                self._lengths[request_id],
            )
            for request_id, count in output.num_scheduled_tokens.items()
        ]

    def _sample(self, segment: Segment) -> list[int]:
        """The tokens of one request's step: accepted drafts and one more; none mid-prefill."""
        if not segment.emits:
            return []
        accepted = 0
        if segment.drafts:
            request_id = segment.request_id
            chance = self._chance.get(request_id)
            if chance is None:
                chance = self._chance[request_id] = Random(f"{self._seed} {request_id}")
            acceptance = self._node.speed.acceptance
            while accepted < segment.drafts and chance.random() < acceptance[accepted]:
                accepted += 1
        self._lengths[segment.request_id] += 1 + accepted
        return [TOKEN] * (1 + accepted)

    # --- what the control side asks -----------------------------------------------------

    def hot_report(self) -> WorkerReport:
        counters = self.tally.counters(self._layout.hot_groups, self._stands_for)
        return WorkerReport(
            counters,
            self._work.miss_curve(),
            request_curves=self._work.request_curves(self._layout.hot_groups),
        )

    def hot_rows(self) -> dict[str, HotRows]:
        return {}

    def resize_hot(self, leases: dict[str, int]) -> None:
        """Rows have no content here, so none has to move."""

    def next_copy_done_s(self) -> float | None:
        """When the next page or chunk in flight arrives."""
        ends = [queue.next_done_s() for queue in self._connectors.queues]
        return min((at_s for at_s in ends if at_s is not None), default=None)

    def copied_bytes(self) -> float:
        """Bulk copies over one GPU's link so far."""
        return sum(queue.bytes_total for queue in self._connectors.queues)

    # --- the rest of the contract -----------------------------------------------------

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Worker methods that have no meaning here answer ``None``, as from one worker."""
        if not non_block:
            return [None]
        future: Future[list[Any]] = Future()
        future.set_result([None])
        return future

    def check_health(self) -> None:
        """Alive as long as its process is."""

    def shutdown(self) -> None:
        connectors = getattr(self, "_connectors", None)
        if connectors is not None:
            connectors.shutdown()

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return False
