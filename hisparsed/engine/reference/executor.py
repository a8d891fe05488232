"""The reference node's executor, in place of vLLM's GPU worker.

Keeps request tables, and computes each step with the reference model over real bytes. Single
process, no devices. ``in_process_executor`` has what vLLM asks of any executor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import (
    DraftTokenIds,
    KVConnectorOutput,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
)

from hisparsed.engine.compat.residency import ResidencyReader
from hisparsed.engine.in_process_executor import InProcessExecutor, LayerRowSize
from hisparsed.engine.reference.connectors import ReferenceConnectors
from hisparsed.engine.reference.drafts import Draft, DraftCounts, NgramDraft
from hisparsed.engine.reference.grammar import allowed_by_request
from hisparsed.engine.reference.hot import ReferenceHotBuffers
from hisparsed.engine.reference.model import ReferenceModel, make_weights
from hisparsed.engine.reference.model_folder import (
    INDEX_ROW_BYTES,
    ROW_BYTES,
    VOCAB_SIZE,
    ReferenceGeometry,
    indexer_layer_name,
    kv_layer_name,
)
from hisparsed.engine.reference.requests import RequestState, RequestTables, ScheduledTokens
from hisparsed.engine.reference.sampling import SampledRequest, StepSampler, natural_logits
from hisparsed.engine.reference.step import StepKV
from hisparsed.engine.reference.store import KVStore
from hisparsed.engine.scratch import scratch_block_ids
from hisparsed.engine.worker_report import HotRows, WorkerReport


@dataclass(frozen=True)
class _Computed:
    """A step whose tokens are still to be sampled."""

    scheduled: tuple[str, ...]
    drafts: Mapping[str, Sequence[int]]
    """As the scheduler named them, with its padding."""
    wanted: tuple[SampledRequest, ...]
    logits: torch.Tensor
    prompt_logprobs: dict[str, LogprobsTensors]
    connector_output: KVConnectorOutput


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
        self._sampler = StepSampler()
        self._computed: _Computed | None = None
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

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput | None:
        """All of a step except its tokens; vLLM makes the grammar's masks meanwhile."""
        self._tables.remove(output.finished_req_ids)
        # A preempted request comes back as a new one, maybe after others that need its state row.
        self._tables.remove(output.preempted_req_ids or ())
        segments = self._admit(output)
        hisparse = self._connectors.before_forward(
            output.kv_connector_metadata, self._decoding(segments)
        )
        for request_id, pages, block_ids in self._residency.updates(output, hisparse):
            self._tables.update_residency(request_id, pages, block_ids)
        wanted: tuple[SampledRequest, ...] = ()
        prompts: dict[str, LogprobsTensors] = {}
        with torch.inference_mode():
            if segments:
                wanted, logits, prompts = self._forward(segments)
            connector_output = self._connectors.after_forward(output.finished_req_ids)
        scheduled = tuple(segment.request_id for segment in segments)
        if not wanted:
            return self._answer({name: [] for name in scheduled}, connector_output)
        self._computed = _Computed(
            scheduled,
            output.scheduled_spec_decode_tokens,
            wanted,
            logits,
            prompts,
            connector_output,
        )
        return None

    def _sample(self, grammar_output: Any) -> ModelRunnerOutput:
        step, self._computed = self._computed, None
        if step is None:
            raise RuntimeError("no step has been computed whose tokens could be sampled")
        with torch.inference_mode():
            tokens, logprobs = self._sampler.sample(
                step.logits, step.wanted, allowed_by_request(grammar_output, step.drafts)
            )
        for one in step.wanted:
            accepted = tokens[one.request_id]
            one.state.tokens.extend(accepted)
            self.draft_counts.count(len(one.drafts), len(accepted) - 1)
        self._emitted = {one.request_id: one.state for one in step.wanted}
        return self._answer(
            {name: tokens.get(name, []) for name in step.scheduled},
            step.connector_output,
            logprobs=_joined(step.scheduled, logprobs),
            prompt_logprobs_dict=step.prompt_logprobs,
        )

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

    def _forward(
        self, segments: list[ScheduledTokens]
    ) -> tuple[tuple[SampledRequest, ...], torch.Tensor, dict[str, LogprobsTensors]]:
        """The requests whose tokens are wanted, the logits of their rows in order, and the values
        requested of prompts that are complete now."""
        kv = StepKV(self._geometry, self._store, self._tables, self._hot, segments)
        states = [self._tables.requests[segment.request_id] for segment in segments]
        tokens = [
            token
            for segment, state in zip(segments, states, strict=True)
            for token in (*state.tokens[segment.start : segment.known_end], *segment.drafts)
        ]
        self._hot.rewritten(segments)
        hidden = self._model.forward(torch.tensor(tokens), kv.positions, kv)
        rows: list[int] = []
        wanted: list[SampledRequest] = []
        prompts: dict[str, LogprobsTensors] = {}
        end = 0
        for segment, state in zip(segments, states, strict=True):
            found = self._prompt_logprobs(segment, state, hidden[end : end + segment.count])
            if found is not None:
                prompts[segment.request_id] = found
            end += segment.count
            if segment.known_end >= len(state.tokens):
                wanted.append(SampledRequest(segment.request_id, state, segment.drafts))
                rows.extend(range(end - 1 - len(segment.drafts), end))
        return tuple(wanted), self._logits(hidden[rows]), prompts

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return natural_logits(self._model.logits(hidden))

    def _prompt_logprobs(
        self, segment: ScheduledTokens, state: RequestState, hidden: torch.Tensor
    ) -> LogprobsTensors | None:
        """Add a chunk of a prompt; returns the requested values once the prompt is complete.

        A request that returned with tokens of its answer had this reported before.
        """
        count = state.params.prompt_logprobs
        if count is None or segment.start >= state.prompt_len or state.known > state.prompt_len:
            return None
        if state.prompt_logprobs is None:
            width = 1 + (VOCAB_SIZE if count == -1 else count)
            state.prompt_logprobs = LogprobsTensors.empty_cpu(state.prompt_len - 1, width)
        last = min(segment.known_end, state.prompt_len - 1)
        if last > segment.start:
            following = state.tokens[segment.start + 1 : last + 1]
            logits = self._logits(hidden[: last - segment.start])
            found = self._sampler.prompt_logprobs(logits, following, count)
            for whole, part in zip(state.prompt_logprobs[:3], found[:3], strict=True):
                whole[segment.start : last] = part
        return state.prompt_logprobs if segment.known_end >= state.prompt_len else None

    def take_draft_token_ids(self) -> DraftTokenIds:
        """Drafts of the requests that emitted in the last step, for vLLM's scheduler."""
        emitted, self._emitted = self._emitted, {}
        return DraftTokenIds(list(emitted), self.draft.propose(list(emitted.values())))

    # --- what the control side asks -----------------------------------------------------

    def hot_report(self) -> WorkerReport:
        """The resolver's counters, for the control report."""
        return WorkerReport(
            counters=self._hot.counters(),
            miss_curve=self._hot.miss_curve(),
            request_curves=self._hot.request_curves(),
        )

    def hot_rows(self) -> dict[str, HotRows]:
        """Each request's hot buffer, for the table of requests."""
        return self._hot.by_request()

    def release_host(self, blocks: Sequence[int]) -> int:
        """Give the memory of host blocks that are unused back; returns bytes."""
        return self._store.release_host(blocks)

    def resize_hot(self, leases: dict[str, int]) -> None:
        """Shrink hot buffers to ``leases`` blocks per group; between steps only."""
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


def _joined(
    scheduled: Sequence[str], logprobs: Mapping[str, LogprobsLists]
) -> LogprobsLists | None:
    """Log probabilities of all requests in the order of the step, with where each one's begin."""
    if not logprobs:
        return None
    found = [logprobs[name] for name in scheduled if name in logprobs]
    counts = [len(logprobs[name].logprobs) if name in logprobs else 0 for name in scheduled]
    return LogprobsLists(
        np.concatenate([one.logprob_token_ids for one in found]),
        np.concatenate([one.logprobs for one in found]),
        np.concatenate([one.sampled_token_ranks for one in found]),
        [0, *np.cumsum(counts).tolist()],
    )
