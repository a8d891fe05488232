"""The reference node's executor: what stands where vLLM's GPU worker is.

Keeps request tables, and computes each step with the reference model over real bytes. Single
process, no devices. Not here: what vLLM asks of any executor (``in_process_executor``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from hisparsed.engine.compat.residency import ResidencyReader
from hisparsed.engine.in_process_executor import InProcessExecutor, LayerRowSize
from hisparsed.engine.reference.connectors import ReferenceConnectors
from hisparsed.engine.reference.hot import ReferenceHotBuffers
from hisparsed.engine.reference.model import ReferenceModel, make_weights
from hisparsed.engine.reference.model_folder import (
    INDEX_ROW_BYTES,
    ROW_BYTES,
    ReferenceGeometry,
    indexer_layer_name,
    kv_layer_name,
)
from hisparsed.engine.reference.requests import RequestState, RequestTables, ScheduledTokens
from hisparsed.engine.reference.sampling import (
    Draft,
    DraftCounts,
    NgramDraft,
    printable_mask,
    verify,
)
from hisparsed.engine.reference.step import StepKV
from hisparsed.engine.reference.store import KVStore
from hisparsed.engine.scratch import scratch_block_ids
from hisparsed.engine.worker_report import HotRows, WorkerReport


class ReferenceExecutor(InProcessExecutor):
    """Options: ``ack_lag_steps``, ``scratch_blocks``, ``threads``."""

    def _init_executor(self) -> None:
        super()._init_executor()
        options = self._options
        self._ack_lag_steps = int(options.get("ack_lag_steps", 1))
        self._scratch_blocks = int(options.get("scratch_blocks", 0))
        torch.set_num_threads(int(options.get("threads", 2)))
        self._geometry = ReferenceGeometry.from_hf_config(self.model_config.hf_config)
        self._model = ReferenceModel(self._geometry, make_weights(self._geometry))
        self._allowed = printable_mask()
        self._emitted: dict[str, RequestState] = {}
        self.draft: Draft = NgramDraft(int(self.vllm_config.num_speculative_tokens))
        self.draft_counts = DraftCounts()

    # --- start-up ---------------------------------------------------------------------

    def _layers(self) -> Iterator[tuple[LayerRowSize, LayerRowSize | None]]:
        for group in range(self._geometry.index_groups):
            leader, *others = self._geometry.group_layers(group)
            indexer = LayerRowSize(indexer_layer_name(leader), INDEX_ROW_BYTES)
            yield LayerRowSize(kv_layer_name(leader), ROW_BYTES), indexer
            for layer in others:
                yield LayerRowSize(kv_layer_name(layer), ROW_BYTES), None

    def determine_available_memory(self) -> list[int]:
        """Bytes for the slab; ``num_gpu_blocks_override`` sets the size that counts."""
        return [1 << 30]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        config = kv_cache_configs[0]
        geometry = self._geometry
        self._store = KVStore(config, geometry, self._block_tokens)
        hot_spec = config.kv_cache_groups[2 + geometry.index_groups].kv_cache_spec
        rows = int(self.scheduler_config.max_num_seqs)
        pages = -(-int(self.model_config.max_model_len) // self._block_tokens) + 2
        self._tables = RequestTables(
            rows, pages, geometry.index_groups, int(hot_spec.blocks_per_request)
        )
        self._residency = ResidencyReader(2, geometry.index_groups)
        self._hot = ReferenceHotBuffers(
            self._store,
            self._tables,
            int(hot_spec.blocks_per_request) * self._block_tokens,
            1 + int(self.vllm_config.num_speculative_tokens),
            scratch_block_ids(self._scratch_blocks),
        )
        self._connectors = ReferenceConnectors(
            self.vllm_config, config, self._store, self._ack_lag_steps
        )

    def get_kv_connector_handshake_metadata(self) -> list[Any]:
        return self._connectors.handshake_metadata()

    # --- steps ------------------------------------------------------------------------

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self._tables.remove(output.finished_req_ids)
        # A preempted request comes back as a new one, maybe after others that need its state row.
        self._tables.remove(output.preempted_req_ids or ())
        segments = self._admit(output)
        hisparse = self._connectors.before_forward(
            output.kv_connector_metadata, self._decoding(segments)
        )
        for request_id, pages, block_ids in self._residency.updates(output, hisparse):
            self._tables.update_residency(request_id, pages, block_ids)
        sampled: dict[str, list[int]] = {}
        with torch.inference_mode():
            if segments:
                sampled = self._forward(segments)
            connector_output = self._connectors.after_forward(output.finished_req_ids)
        tokens = {one.request_id: sampled.get(one.request_id, []) for one in segments}
        return self._answer(tokens, connector_output)

    def _admit(self, output: SchedulerOutput) -> list[ScheduledTokens]:
        """Bring the tables up to date; segments of this step, decodes first."""
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            state = self._tables.add(new)
            self._hot.reset(state)
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request_id, block_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            state = self._tables.requests[request_id]
            if block_ids is not None and self._tables.append_blocks(state, block_ids):
                self._hot.lease_changed(state)
            starts[request_id] = computed
        segments = [
            self._segment(request_id, starts[request_id], int(count), output)
            for request_id, count in output.num_scheduled_tokens.items()
        ]
        segments.sort(key=lambda segment: not segment.decodes)
        return segments

    def _decoding(self, segments: Sequence[ScheduledTokens]) -> set[str]:
        """Requests whose rows of this step are of tokens that were generated here."""
        known = {name: state.known for name, state in self._tables.requests.items()}
        return {one.request_id for one in segments if one.start >= known[one.request_id]}

    def _segment(
        self, request_id: str, start: int, count: int, output: SchedulerOutput
    ) -> ScheduledTokens:
        scheduled = output.scheduled_spec_decode_tokens.get(request_id, ())
        # vLLM pads with -1 for even batches: not drafts, and nothing here needs the padding.
        drafts = tuple(token for token in scheduled if token >= 0)
        row = self._tables.requests[request_id].row
        return ScheduledTokens(request_id, row, start, count - len(scheduled) + len(drafts), drafts)

    def _forward(self, segments: list[ScheduledTokens]) -> dict[str, list[int]]:
        kv = StepKV(self._geometry, self._store, self._tables, self._hot, segments)
        states = [self._tables.requests[segment.request_id] for segment in segments]
        tokens = [
            token
            for segment, state in zip(segments, states, strict=True)
            for token in (*state.tokens[segment.start : segment.known_end], *segment.drafts)
        ]
        self._hot.rewritten(segments)
        hidden = self._model.forward(torch.tensor(tokens), kv.positions, kv)
        wanted: list[int] = []
        emitting: list[tuple[ScheduledTokens, RequestState]] = []
        end = 0
        for segment, state in zip(segments, states, strict=True):
            end += segment.count
            if segment.known_end >= len(state.tokens):
                emitting.append((segment, state))
                wanted.extend(range(end - 1 - len(segment.drafts), end))
        if not emitting:
            return {}
        logits = iter(self._model.logits(hidden.index_select(0, torch.tensor(wanted))))
        sampled: dict[str, list[int]] = {}
        for segment, state in emitting:
            rows = [next(logits) for _ in range(1 + len(segment.drafts))]
            accepted = verify(
                rows,
                segment.drafts,
                self._allowed,
                state.params,
                request_id=segment.request_id,
                generated=state.generated,
            )
            state.tokens.extend(accepted)
            sampled[segment.request_id] = accepted
            self.draft_counts.count(len(segment.drafts), len(accepted) - 1)
        self._emitted = {segment.request_id: state for segment, state in emitting}
        return sampled

    def take_draft_token_ids(self) -> DraftTokenIds:
        """Drafts of the requests that emitted in the last step, for vLLM's scheduler."""
        emitted, self._emitted = self._emitted, {}
        return DraftTokenIds(list(emitted), self.draft.propose(list(emitted.values())))

    # --- what the control side asks -----------------------------------------------------

    def hot_report(self) -> WorkerReport:
        """What the resolver counted, for the control report."""
        return WorkerReport(
            counters=self._hot.counters(),
            miss_curve=self._hot.miss_curve(),
            request_curves=self._hot.request_curves(),
        )

    def hot_rows(self) -> dict[str, HotRows]:
        """Each request's hot buffer, for the table of requests."""
        return self._hot.by_request()

    def release_host(self, blocks: Sequence[int]) -> int:
        """Give the memory of host blocks that are in nobody's use back; returns bytes."""
        return self._store.release_host(blocks)

    def resize_hot(self, leases: dict[str, int]) -> None:
        """Shrink hot buffers to ``leases`` blocks a group; between steps only."""
        for request_id, blocks in leases.items():
            state = self._tables.requests.get(request_id)
            if state is not None:
                self._hot.shrink(state, blocks)

    # --- the end ------------------------------------------------------------------------

    def shutdown(self) -> None:
        super().shutdown()
        store = getattr(self, "_store", None)
        if store is not None:
            store.close()
