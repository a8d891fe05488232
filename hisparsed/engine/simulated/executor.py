"""The simulated node's executor: virtual time for a forward pass.

The simulation drives its engine core step by step. Emits made-up tokens; accepts drafts by chance,
from a seed and the request's name. Other modules: what vLLM asks of any executor
(``in_process_executor``), the cost of a step and its misses (``cost``), the end of copies
(``connectors``).
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from hisparsed.config.node_description import NodeDescription
from hisparsed.engine.in_process_executor import InProcessExecutor, LayerRowSize
from hisparsed.engine.simulated.connectors import (
    Connectors,
    GpuLink,
    HiSparseConnectors,
    StandardConnectors,
)
from hisparsed.engine.simulated.cost import CostModel, RowModel, VirtualClock
from hisparsed.engine.simulated.work import RequestResidency, StepPart, StepWorker, WorkTotals
from hisparsed.engine.step_cpu import DescribedCpuTimes
from hisparsed.engine.worker_report import HotRows, WorkerReport
from hisparsed.plan.layout import real_layout

TOKEN = 1
"""Every token that the node makes up."""


class SimulatedExecutor(InProcessExecutor):
    """Options: ``node``, ``seed``, ``stands_for``. ``bind`` must follow construction."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self._node = NodeDescription.model_validate(self._options["node"])
        self._seed = int(self._options["seed"])
        self._stands_for = float(self._options["stands_for"])
        self._cost = CostModel(self._node, self._stands_for)
        self._layout = real_layout(self._node, 1)
        self._hisparse = self.vllm_config.attention_config.hisparse_config is not None
        self._lengths: dict[str, int] = {}
        self._chance: dict[str, Random] = {}
        self._drafting: list[str] = []
        self.clock = VirtualClock()
        self._link = GpuLink(self.clock, self._cost)
        self.tally = WorkTotals()
        self.step_cpu = DescribedCpuTimes()

    # --- start-up ---------------------------------------------------------------------

    def _layers(self) -> Iterator[tuple[LayerRowSize, LayerRowSize | None]]:
        model = self._node.model
        leaders = set(model.index_leaders())
        for layer in range(model.layers):
            indexer = LayerRowSize(f"layers.{layer}.indexer", model.index_row_bytes)
            rows = LayerRowSize(f"layers.{layer}.mla", model.row_bytes)
            yield rows, indexer if layer in leaders else None

    def determine_available_memory(self) -> list[int]:
        return [self._node.gpu.kv_memory]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        kind = HiSparseConnectors if self._hisparse else StandardConnectors
        self._connectors: Connectors = kind(
            self.vllm_config, kv_cache_configs[0], self._link, self._layout
        )

    def bind(self, residency: RequestResidency) -> None:
        """Where to ask for resident pages and hot leases: vLLM's own managers know."""
        rows = self._node.rows
        self._work = StepWorker(
            RowModel(self._node.model.topk, rows.miss_curve, rows.union),
            residency,
            self._block_tokens,
            self._node.model.topk,
            self._node.engine.max_num_batched_tokens,
            self._locality,
        )

    def _locality(self, request_id: str) -> float:
        spread = self._node.rows.spread
        if not spread:
            return 1.0
        return float((1 + spread) ** Random(f"{self._seed} rows {request_id}").uniform(-1, 1))

    # --- steps ------------------------------------------------------------------------

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
            # The step waits for its rows, so they go first.
            self._link.to_gpu.give_way(time.gather_s)
            self.clock.advance(time.total_s)
            self.tally.step(work, time, self._cost)
            self.step_cpu.add(self.clock.now_s(), time.core_s)
        connector_output = self._connectors.after_forward(output.finished_req_ids)
        sampled = {segment.request_id: self._sample(segment) for segment in segments}
        if sampled:
            self._drafting = [request_id for request_id, tokens in sampled.items() if tokens]
        return self._answer(sampled, connector_output)

    def _segments(self, output: SchedulerOutput) -> list[StepPart]:
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self._lengths[new.req_id] = len(tokens)
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        drafts = output.scheduled_spec_decode_tokens
        return [
            StepPart(
                request_id,
                starts[request_id],
                count,
                len(drafts.get(request_id, ())),
                self._lengths[request_id],
            )
            for request_id, count in output.num_scheduled_tokens.items()
        ]

    def _sample(self, segment: StepPart) -> list[int]:
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
        return self._link.next_done_s()

    def copied_bytes(self) -> float:
        """Bulk copies over one GPU's link so far."""
        return self._link.bytes_total
