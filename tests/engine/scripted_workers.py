"""Replaces the workers: takes a step's work and acknowledges it when the test asks for it.

Drives the scheduler of a real engine directly; nothing is computed. Knows which host blocks its
transfers touch, so it detects when two touch the same one.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from conversations import EngineShape, core_of

SMALL_NODE = EngineShape(
    gpu_blocks=160,
    host_budget_bytes=2 << 20,
    max_num_seqs=6,
    max_num_batched_tokens=64,
    max_model_len=256,
)


@dataclass(frozen=True)
class OffloadJob:
    request_id: str
    is_load: bool
    host_blocks: frozenset[int]


class ScriptedWorkers:
    """``hold_offload`` keeps loads and stores in flight, except those that vLLM flushes."""

    def __init__(self, engine: Any) -> None:
        self.core = core_of(engine)
        self.scheduler: Any = self.core.scheduler
        self.host: Any = self.scheduler.hisparsed.host
        self.jobs: dict[int, OffloadJob] = {}
        self.pages: dict[int, int] = {}  # transfer id -> host block
        self.copies: dict[int, int] = {}  # destination host block -> source
        self.hold_offload = False
        self.tokens = 0
        self.preempted = 0
        self._due: dict[int, set[str]] = {}  # of a step that is not answered yet
        self._ids = itertools.count()

    # --- requests ---------------------------------------------------------------------

    def admit(self, prompt: list[int], answer_tokens: int) -> str:
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        request_id = f"r{next(self._ids)}"
        params = SamplingParams(temperature=0.0, max_tokens=answer_tokens, ignore_eos=True)
        params.update_from_generation_config({}, eos_token_id=None)
        request, _ = self.core.preprocess_add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
        )
        self.scheduler.add_request(request)
        return request_id

    def cancel(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    @property
    def unfinished(self) -> list[str]:
        return list(self.scheduler.requests)

    def is_busy(self) -> bool:
        """Whether vLLM would take another step."""
        return bool(self.scheduler.has_requests())

    # --- steps ------------------------------------------------------------------------

    def step(self, share_done: float = 1.0, rng: random.Random | None = None) -> Any:
        """One engine step; each transfer in flight ends with it at odds of ``share_done``."""
        return self.answer(self.schedule(), share_done, rng)

    def schedule(self) -> Any:
        output = self.scheduler.schedule()
        self.preempted += len(output.preempted_req_ids or ())
        requests = self.scheduler.requests
        self._due[id(output)] = {
            name
            for name in output.num_scheduled_tokens
            if requests[name].num_computed_tokens >= requests[name].num_tokens
        }
        return output

    def answer(self, output: Any, share_done: float = 1.0, rng: random.Random | None = None) -> Any:
        """Do the step that ``output`` asks for and hand the result to the scheduler."""
        from vllm.v1.outputs import ModelRunnerOutput

        dice = rng or random.Random(0)
        connector_output = self._transfers(output, lambda: dice.random() < share_done)
        if not output.total_num_scheduled_tokens:
            result = ModelRunnerOutput.with_kv_conn_output_only(connector_output)
            return self.scheduler.update_from_output(output, result)
        names = list(output.num_scheduled_tokens)
        due = self._due.pop(id(output))
        sampled = [[dice.randrange(32, 127)] if name in due else [] for name in names]
        self.tokens += sum(map(len, sampled))
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=connector_output,
        )
        return self.scheduler.update_from_output(output, result)

    def run(self, steps: int = 2000) -> None:
        """Step with every transfer ending at once until vLLM has nothing to do."""
        for _ in range(steps):
            if not self.is_busy():
                return
            self.step()
        raise AssertionError(f"still busy after {steps} steps: {self.unfinished}")

    def _transfers(self, output: Any, ends: Any) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector import (
            HiSparseConnectorWorkerMetadata,
        )
        from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
            MultiKVConnectorWorkerMetadata,
        )
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
            OffloadingWorkerMetadata,
        )
        from vllm.v1.outputs import KVConnectorOutput

        hisparse, offload = output.kv_connector_metadata.metadata
        done = self._offload_jobs(offload, ends)
        pages, copies = self._page_transfers(hisparse, ends)
        self._no_two_writers()
        loaded = {job.request_id for job in done.values() if job.is_load}
        return KVConnectorOutput(
            finished_recving=loaded or None,
            kv_connector_worker_meta=MultiKVConnectorWorkerMetadata(
                (
                    HiSparseConnectorWorkerMetadata(
                        dict.fromkeys(pages, 1), dict.fromkeys(pages, 1), tuple(copies)
                    ),
                    OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(done, 1)),
                )
            ),
        )

    def _offload_jobs(self, offload: Any, ends: Any) -> dict[int, OffloadJob]:
        locate = self.host.ledger.layout.locate

        def job(entry: Any, chunks: Any, is_load: bool) -> OffloadJob:
            blocks = frozenset(locate(chunk)[0] for chunk in chunks.block_ids.tolist())
            return OffloadJob(entry.req_id, is_load, blocks)

        flushed = {
            number: self.jobs.pop(number) for number in offload.jobs_to_flush if number in self.jobs
        }
        for number, entry in offload.store_jobs.items():
            new = job(entry, entry.dst_spec, False)
            (flushed if number in offload.jobs_to_flush else self.jobs)[number] = new
        ended = [number for number in self.jobs if not self.hold_offload and ends()]
        done = flushed | {number: self.jobs.pop(number) for number in ended}
        for number, entry in offload.load_jobs.items():
            self.jobs[number] = job(entry, entry.src_spec, True)
        return done

    def _page_transfers(self, hisparse: Any, ends: Any) -> tuple[list[int], list[int]]:
        pages = [number for number in self.pages if ends()]
        copies = [block for block in self.copies if ends()]
        for number in pages:
            del self.pages[number]
        for block in copies:
            del self.copies[block]
        for copy in hisparse.host_block_copies:
            self.copies[copy.dst_block_id] = copy.src_block_id
        if hisparse.command is not None:
            for transfer in hisparse.command.page_transfers:
                self.pages[transfer.transfer_id] = transfer.host_block_id
        return pages, copies

    def _no_two_writers(self) -> None:
        offload = {block for job in self.jobs.values() for block in job.host_blocks}
        hisparse = {*self.pages.values(), *self.copies, *self.copies.values()}
        assert not offload & hisparse, f"host blocks {offload & hisparse} are used by two tenants"

    # --- checks -----------------------------------------------------------------------

    def check(self) -> None:
        """Every invariant, and that a transfer in flight keeps its block where it belongs."""
        assert self.host.watch.look_at_everything() == []
        for job in self.jobs.values():
            for block in job.host_blocks:
                assert self.host.offload.holds(block), f"block {block} left under a transfer"
        free = {block.block_id for block in self.host.pool.free_block_queue.get_all_free_blocks()}
        assert not free & {*self.pages.values(), *self.copies, *self.copies.values()}

    def tenants(self) -> Counter[str]:
        counts = self.host.ledger.counts()
        return Counter(hisparse=counts.hisparse_capacity, lent=counts.lent, reserve=counts.reserve)
