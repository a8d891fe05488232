"""vLLM's own engine core with HiSparse and CPU offloading, without a GPU and without hisparsed.

``EngineCore`` builds scheduler, cache managers, coordinator and connectors; all of them are vLLM's.
``NoWorkers`` replaces its GPU workers: it describes the layers of a small sparse-MLA model and
computes nothing. ``Workers`` takes each step's output, ends transfers when the caller asks for it,
and samples a made-up token. HiSparse is put into the configuration after vLLM has checked it,
because vLLM accepts HiSparse on CUDA only.
"""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

BLOCK = 16
TOPK = 64
ROW_BYTES = 656
INDEXER_ROW_BYTES = 132


@dataclass(frozen=True)
class Shape:
    """Sizes of the node. Blocks have 16 tokens."""

    gpu_blocks: int = 160
    host_blocks: int = 400
    offload_bytes: int = 8 << 20
    index_groups: int = 2
    layers_per_group: int = 4
    hot_rows: int = 256
    max_num_seqs: int = 6
    max_num_batched_tokens: int = 64
    max_model_len: int = 256
    overlap: bool = False
    """vLLM's asynchronous scheduler, with two steps in flight."""


@contextmanager
def stock_engine(shape: Shape) -> Iterator[Any]:
    """A started ``EngineCore``; nothing of it outlives the block."""
    from vllm.v1.engine.core import EngineCore

    with tempfile.TemporaryDirectory(prefix="hisparse-stock-") as folder:
        core = EngineCore(_config(shape, Path(folder)), executor_class(shape), log_stats=False)
        try:
            yield core
        finally:
            core.shutdown()


def _config(shape: Shape, folder: Path) -> Any:
    from vllm.config import HiSparseConfig, KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "vocab_size": 256,
        "max_position_embeddings": shape.max_model_len,
        "torch_dtype": "float32",
        "index_topk": TOPK,
    }
    (folder / "config.json").write_text(json.dumps(model))
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        block_size=BLOCK,
        max_model_len=shape.max_model_len,
        num_gpu_blocks_override=shape.gpu_blocks,
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        disable_hybrid_kv_cache_manager=False,
        enforce_eager=True,
    ).create_engine_config()
    config.attention_config.hisparse_config = HiSparseConfig(device_buffer_size=shape.hot_rows)
    layers = shape.index_groups * shape.layers_per_group
    host_bytes = shape.host_blocks * BLOCK * ROW_BYTES * layers
    connectors = [
        ("HiSparseConnector", {"host_pool_gib": host_bytes / 2**30}),
        (
            "OffloadingConnector",
            {"cpu_bytes_to_use": shape.offload_bytes, "offload_prompt_only": False},
        ),
    ]
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "connectors": [
                {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
                for name, extra in connectors
            ]
        },
    )
    if shape.overlap:
        config.scheduler_config.async_scheduling = True
        config.scheduler_config.scheduler_cls = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
    return config


def executor_class(shape: Shape) -> Any:
    """An executor for ``shape`` that has no workers."""
    import torch
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.hisparse.layout import get_hisparse_kv_cache_groups
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

    # What vLLM's sparse-MLA models set; 0.30 has no such field.
    has_shards = "max_tp_shards" in {field.name for field in fields(MLAAttentionSpec)}
    replicated = {"max_tp_shards": 1} if has_shards else {}

    def spec(row_bytes: int, role: Any, leads: bool) -> Any:
        return MLAAttentionSpec(
            block_size=BLOCK,
            num_kv_heads=1,
            head_size=row_bytes,
            dtype=torch.int8,
            cache_role=role,
            is_index_group_leader=leads,
            **replicated,
        )

    class NoWorkers(Executor):  # type: ignore[misc]
        def _init_executor(self) -> None:
            pass

        def get_kv_cache_specs(self) -> list[dict[str, Any]]:
            specs: dict[str, Any] = {}
            for layer in range(shape.index_groups * shape.layers_per_group):
                leads = layer % shape.layers_per_group == 0
                specs[f"layers.{layer}.mla"] = spec(ROW_BYTES, SparseCacheRole.SPARSE, leads)
                if leads:
                    name = f"layers.{layer}.indexer"
                    specs[name] = spec(INDEXER_ROW_BYTES, SparseCacheRole.INDEXER, False)
            for group in get_hisparse_kv_cache_groups(self.vllm_config, specs) or []:
                for name in group.layer_names:
                    specs.setdefault(name, group.kv_cache_spec)
            return [specs]

        def get_supported_kv_cache_layouts(self) -> list[list[str]]:
            return [["BLHNC"]]

        def set_kv_cache_layout(self, *layout: Any) -> None:
            pass

        def determine_available_memory(self) -> list[int]:
            return [1 << 40]

        def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
            pass

        def compile_or_warm_up_model(self) -> None:
            pass

        def get_kv_connector_handshake_metadata(self) -> list[Any]:
            return []

        @property
        def supported_tasks(self) -> tuple[str, ...]:
            return ("generate",)

        @classmethod
        def supports_async_scheduling(cls) -> bool:
            return True

        def collective_rpc(self, *call: Any, **named: Any) -> list[None]:
            return [None]

        def check_health(self) -> None:
            pass

        def shutdown(self) -> None:
            pass

    return NoWorkers


def text(tokens: int, seed: int | str) -> list[int]:
    """The same token ids for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(32, 127) for _ in range(tokens)]


class Workers:
    """Drives the scheduler of an engine core. Page transfers end with the next step.

    With ``hold`` set, loads and stores of the offloading connector stay in flight, except those
    that vLLM asks to flush.
    """

    def __init__(self, core: Any) -> None:
        self.core = core
        self.scheduler: Any = core.scheduler
        self.hold = False
        self.jobs: dict[int, Any] = {}
        """Jobs in flight, by number: vLLM's ``TransferJob``."""
        self.loads: set[int] = set()
        self.flushed: set[int] = set()
        """Jobs that vLLM asked for in the last step."""
        self._pages: set[int] = set()
        self._copies: set[int] = set()
        self._due: dict[int, set[str]] = {}
        self._ids = itertools.count()

    def add(self, prompt: list[int], answer_tokens: int = 2) -> str:
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

    @property
    def unfinished(self) -> list[str]:
        return list(self.scheduler.requests)

    @property
    def gpu_pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def schedule(self) -> Any:
        output = self.scheduler.schedule()
        requests = self.scheduler.requests
        self._due[id(output)] = {
            name
            for name in output.num_scheduled_tokens
            if requests[name].num_computed_tokens >= requests[name].num_tokens
        }
        return output

    def answer(self, output: Any) -> None:
        """What the workers of one step say."""
        from vllm.v1.outputs import ModelRunnerOutput

        connector_output = self._transfers(output)
        if not output.total_num_scheduled_tokens:
            result = ModelRunnerOutput.with_kv_conn_output_only(connector_output)
            self._due.pop(id(output), None)
        else:
            names = list(output.num_scheduled_tokens)
            due = self._due.pop(id(output))
            result = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[[65] if name in due else [] for name in names],
                kv_connector_output=connector_output,
            )
        self.scheduler.update_from_output(output, result)

    def step(self) -> Any:
        output = self.schedule()
        self.answer(output)
        return output

    def run(self, steps: int = 500) -> bool:
        """Whether nothing was left to do after at most this many steps."""
        for _ in range(steps):
            if not self.scheduler.has_requests():
                return True
            self.step()
        return not self.scheduler.has_requests()

    def forget_gpu_prefixes(self) -> None:
        """The blocks that other calls would have evicted from the GPU in the meantime."""
        assert self.gpu_pool.reset_prefix_cache()

    def _transfers(self, output: Any) -> Any:
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
        done = self._offload_jobs(offload)
        pages, self._pages = self._pages, set()
        copies, self._copies = self._copies, set()
        self._copies.update(copy.dst_block_id for copy in hisparse.host_block_copies)
        if hisparse.command is not None:
            self._pages.update(one.transfer_id for one in hisparse.command.page_transfers)
        loaded = {job.req_id for number, job in done.items() if number in self.loads}
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

    def _offload_jobs(self, offload: Any) -> dict[int, Any]:
        self.flushed = set(offload.jobs_to_flush or ())
        known = self.jobs | offload.store_jobs
        done = {
            number: known.pop(number)
            for number in list(known)
            if number in self.flushed or (number in self.jobs and not self.hold)
        }
        self.jobs = known | offload.load_jobs
        self.loads.update(offload.load_jobs)
        return done
