"""The CUDA node's start: from the node's document to vLLM's configuration on NVIDIA GPUs.

One of the modules that ``hisparsed.engine.launch`` chooses from. Imports vLLM only when called.
``checks`` says what cannot start; it is asked before anything is taken, and again once vLLM has
read the config of a model that it had to look up. The two names at the top are what vLLM is
given where our kernels serve the hot buffers; ``compat.features`` says which vLLM versions take
them.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hisparsed.config.machine import available_memory_bytes
from hisparsed.config.node import NodeConfig
from hisparsed.config.sections import DisaggregationConfig
from hisparsed.engine.cuda import checks, model_config
from hisparsed.engine.cuda.checks import SIDE_CHANNEL, GpuFacts, MachineFacts
from hisparsed.engine.cuda.model_config import BLOCK_TOKENS, ModelFacts, facts_of, read_model
from hisparsed.engine.cuda.nvml import GpuReader, log_unreadable, nvidia_library
from hisparsed.engine.scratch import whole_step_scratch_blocks
from hisparsed.errors import MachineShortError, UserError

if TYPE_CHECKING:
    from hisparsed.engine.port import HotPolicy


WORKER_EXTENSION: Final = "hisparsed.engine.cuda.residency.vllm_hooks.HotExtension"
CONNECTOR_MODULE: Final = "hisparsed.engine.cuda.residency.vllm_hooks"


log = logging.getLogger("hisparsed.engine")

SCHEDULER = "hisparsed.engine.scheduler.HisparsedScheduler"
ASYNC_SCHEDULER = "hisparsed.engine.scheduler.HisparsedAsyncScheduler"
SHM = Path("/dev/shm")  # noqa: S108 (the kernel's, not a temporary file)


def decode_query_len(config: NodeConfig) -> int:
    """Decode rows of a request in one step: its drafts and one more."""
    return 1 + config.cuda.speculative_tokens


def served_names(config: NodeConfig) -> tuple[str, ...]:
    """The model names that clients may ask for: every ``served_model_name``, else the model."""
    if config.model == model_config.TINY_MODEL:
        return (model_config.TINY_MODEL,)
    names = config.engine_args.get("served_model_name") or config.model
    return tuple(str(name) for name in (names if isinstance(names, list) else [names]))


def asked_multiplier(config: NodeConfig, policy: HotPolicy) -> float:
    """vLLM's kernels have one size, the policy's start value; hisparsed's change it live.

    ``auto`` is vLLM's until hisparsed's are proved: see ``proved_multiplier``.
    """
    if config.cuda.kernels == "hisparsed":
        return policy.highest_multiplier(decode_query_len(config))
    return policy.start_multiplier(decode_query_len(config))


def proved_multiplier(config: NodeConfig, policy: HotPolicy) -> float | None:
    """The multiplier instead of it once hisparsed's kernels are proved; ``None`` where nothing is
    to be proved."""
    if config.cuda.kernels != "auto":
        return None
    return policy.highest_multiplier(decode_query_len(config))


def require_startable(config: NodeConfig, *, max_multiplier: float) -> None:
    """Refuse all that can never start, in one error. Raises ``UserError``, which is a
    ``MachineShortError`` where the machine alone is in the way."""
    machine = read_machine_facts()
    short = list(checks.machine_problems(config, machine))
    wrong = start_problems(config, machine, max_multiplier, os.environ)
    if short and not wrong:
        raise MachineShortError("\n".join(short))
    _raise([*short, *wrong])


def start_problems(
    config: NodeConfig,
    machine: MachineFacts,
    max_multiplier: float,
    environ: Mapping[str, str],
) -> list[str]:
    """Configurations that can never start on any machine, each with the expected value."""
    problems = [
        *checks.argument_problems(config),
        *checks.environment_problems(environ),
        *checks.disaggregation_problems(
            config.disaggregation, environ, nixl_is_there=find_spec("nixl") is not None
        ),
    ]
    try:
        model = model_facts(config)
    except UserError as error:
        return [*problems, str(error)]
    if model is not None:
        problems += checks.model_problems(config, model, max_multiplier)
        problems += checks.size_problems(config, model, machine, max_multiplier)
    return problems


def _raise(problems: Iterable[str]) -> None:
    text = "\n".join(problems)
    if text:
        raise UserError(text)


def model_facts(config: NodeConfig) -> ModelFacts | None:
    """Facts of the model; ``None`` where only vLLM can look it up. Raises ``UserError``."""
    if config.model is None:
        raise UserError("model: a cuda node has no default model; name a folder or a model")
    if config.model == model_config.TINY_MODEL:
        return facts_of(model_config.tiny_config())
    return read_model(config.model)


def known_facts(config: NodeConfig) -> ModelFacts:
    """As ``model_facts``; a model that only vLLM can look up is looked up, without weights.

    Imports vLLM then. Raises ``UserError``.
    """
    facts = model_facts(config)
    if facts is not None:
        return facts
    from vllm.engine.arg_utils import AsyncEngineArgs

    try:
        model = AsyncEngineArgs(**engine_arguments(config)).create_model_config()
    except (ValueError, TypeError, OSError) as error:
        raise UserError(f"engine_args, model or cuda: vLLM refuses them: {error}") from error
    return config_facts(model)


def config_facts(model_config: Any) -> ModelFacts:
    """Facts of vLLM's model configuration."""
    return facts_of(model_config.hf_config.to_dict())


def read_machine_facts(*, on_unreadable: Callable[[str], None] = log_unreadable) -> MachineFacts:
    """The free memory of this machine now; ``on_unreadable`` gets the values that the driver does
    not report."""
    reader = GpuReader(nvidia_library(), os.environ, on_unreadable=on_unreadable)
    try:
        gpus = reader.read()
    finally:
        reader.close()
    return MachineFacts(
        available_bytes=available_memory_bytes(),
        shm_free_bytes=shutil.disk_usage(SHM).free,
        gpus=tuple(
            GpuFacts(gpu.memory_total_bytes, gpu.capability)
            for gpu in gpus
            if gpu.memory_total_bytes is not None
        ),
    )


def llm_class() -> Any:
    from hisparsed.engine.limited_llm import LimitedLLM

    return LimitedLLM


def vllm_config(config: NodeConfig, *, max_multiplier: float) -> Any:
    """vLLM's configuration, checked again with what vLLM read.

    Raises ``UserError`` when vLLM refuses it. Reads no weights and takes nothing on a GPU.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    own = config.disaggregation
    if own is not None:
        # The engine core listens there, in a process that takes them over.
        os.environ.update({name: str(getattr(own, key)) for name, key in SIDE_CHANNEL.items()})
    try:
        arguments = AsyncEngineArgs(**engine_arguments(config))
        # Unset arguments are as under `vllm serve`; without a usage context vLLM takes less.
        built = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except (ValueError, TypeError, OSError) as error:
        raise UserError(f"engine_args, model or cuda: vLLM refuses them: {error}") from error
    finish(built, config, max_multiplier=max_multiplier)
    return built


def engine_arguments(config: NodeConfig) -> dict[str, Any]:
    """All engine arguments, the operator's and hisparsed's; a ``None`` of hisparsed is left to
    vLLM."""
    cuda = config.cuda
    ours: dict[str, Any] = {
        "model": config.model,
        "tensor_parallel_size": cuda.tensor_parallel_size,
        "max_model_len": cuda.max_model_len,
        "max_num_seqs": cuda.max_num_seqs,
        "max_num_batched_tokens": cuda.max_num_batched_tokens,
        "gpu_memory_utilization": cuda.gpu_memory_utilization,
        "kv_cache_dtype": cuda.kv_cache_dtype,
        "block_size": BLOCK_TOKENS,
        "enable_prefix_caching": True,
        "scheduler_reserve_full_isl": True,
        "disable_hybrid_kv_cache_manager": False,
        # One pool that all ranks map: with any other executor each rank pins its own.
        "distributed_executor_backend": "mp" if cuda.tensor_parallel_size > 1 else "uni",
        "scheduler_cls": ASYNC_SCHEDULER,
        "kv_transfer_config": kv_transfer_config(
            config.host_budget, cuda.kernels, config.disaggregation
        ),
        "attention_config": {
            **checks.mapping_argument(config.engine_args.get("attention_config")),
            "hisparse_config": {"eager_host_mirror": cuda.eager_host_mirror},
        },
    }
    if cuda.speculative_tokens:
        ours["speculative_config"] = {
            "method": "mtp",
            "num_speculative_tokens": cuda.speculative_tokens,
        }
    if cuda.kernels == "hisparsed":
        ours["worker_extension_cls"] = WORKER_EXTENSION
    model: dict[str, Any] = {}
    if config.model == model_config.TINY_MODEL:
        folder = model_config.write_tiny_model(config.state_dir / "tiny-model")
        model = {"model": str(folder), "served_model_name": [model_config.TINY_MODEL]}
        model |= model_config.TINY_ENGINE_ARGS
    given = {name: value for name, value in ours.items() if value is not None}
    return {**config.engine_args, **given, **model}


def kv_transfer_config(
    host_budget_bytes: int, kernels: str, disaggregation: DisaggregationConfig | None = None
) -> dict[str, Any]:
    """HiSparse with the whole budget as its pool, offloading on blocks lent from it.

    HiSparse comes first: the offload workers look for its pool when they are made. NIXL is between
    them on a decode node: what waits elsewhere is fetched before the offload pool is asked.
    """
    hisparse: dict[str, Any] = {
        "kv_connector": "HiSparseConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_pool_gib": host_budget_bytes / 2**30},
    }
    if kernels == "hisparsed":
        hisparse["kv_connector_module_path"] = CONNECTOR_MODULE
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CudaOffloadingSpec",
            "spec_module_path": "hisparsed.engine.cuda.offload",
            # The pool owns no memory: vLLM only asks that this is not zero.
            "cpu_bytes_to_use": 1,
            "offload_prompt_only": False,
        },
    }
    connectors = [hisparse, offloading]
    if disaggregation is not None:
        nixl = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_consumer",
            "kv_connector_extra_config": disaggregation.nixl,
        }
        connectors.insert(1, nixl)
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        # vLLM's default fails a call whose load failed.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": connectors},
    }


def finish(built: Any, config: NodeConfig, *, max_multiplier: float) -> None:
    """Set what depends on the model and on vLLM's own choices, and look at the whole again.

    Raises ``UserError`` for a model that vLLM had to look up and that cannot be served.
    """
    facts = config_facts(built.model_config)
    _raise(checks.model_problems(config, facts, max_multiplier))
    topk = int(facts.index_topk or 0)
    rows = checks.hot_rows(config, topk, max_multiplier)
    built.attention_config.hisparse_config.device_buffer_size = rows
    if not built.scheduler_config.async_scheduling:
        built.scheduler_config.scheduler_cls = SCHEDULER
    ours = config.cuda.kernels == "hisparsed"
    options: dict[str, Any] = {
        "kernels": "hisparsed" if ours else "vllm",
        "bookkeeping": config.bookkeeping,
    }
    if config.disaggregation is not None:
        options["prefill_peers"] = list(config.disaggregation.peers)
    if ours and config.cuda.hot_scratch:
        options["scratch_blocks"] = whole_step_scratch_blocks(
            query_len=decode_query_len(config),
            topk=topk,
            block_tokens=BLOCK_TOKENS,
            max_num_seqs=int(built.scheduler_config.max_num_seqs),
        )
    built.additional_config["hisparsed"] = options
    log.info("Hot buffers of %d rows, found by %s's kernels.", rows, options["kernels"])
