# ruff: noqa: E402 (vLLM must see GPUs before anything else of it is imported)
"""How far a CUDA launch gets without a GPU: from a profile to an engine core that serves.

A program: `launch_probe.py PROFILE FOLDER`. Prints one line of JSON for the tests. vLLM's
configuration, planner, scheduler, connectors and engine core are its own, and so is our offloading
spec's scheduler side. Workers are the simulated node's, eight of them in one.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["HISPARSED_ENGINE"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from eight_h200 import GLM_CONFIG, believe_in_gpus

believe_in_gpus(["GlmMoeDsaForCausalLM", "DeepSeekMTPModel"])

import torch
from vllm import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.hisparse.coordinator import get_hisparse_coordinator
from vllm.v1.hisparse.layout import get_hisparse_kv_cache_groups
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole
from vllm.v1.request import Request

from hisparsed.config.node import NodeConfig, load_node_config, shipped_config
from hisparsed.config.node_description import load_node_description
from hisparsed.engine.cuda import launch
from hisparsed.engine.cuda.model_config import facts_of
from hisparsed.engine.messages import report_from_wire
from hisparsed.engine.openai_app import frontend_arguments
from hisparsed.engine.plugin import control, register
from hisparsed.engine.simulated.executor import SimulatedExecutor
from hisparsed.engine.simulated.work import ManagersResidency
from hisparsed.policy.signals import EngineReport

TURN_TOKENS = 3000
ANSWER_TOKENS = 20


def layer_specs(vllm_config: Any) -> dict[str, Any]:
    """The layers that GPU workers would report, also those that HiSparse derives."""
    facts = facts_of(vllm_config.model_config.hf_config.to_dict())
    every, offset = GLM_CONFIG["index_topk_freq"], GLM_CONFIG["index_skip_topk_offset"]
    specs: dict[str, Any] = {}
    for layer in range(facts.layers + facts.draft_layers):
        leads = layer >= facts.layers or max(layer - offset + 1, 0) % every == 0
        shapes = [("attn", facts.row_bytes("fp8_ds_mla"), SparseCacheRole.SPARSE, leads)]
        if leads:
            shapes.append(("indexer", facts.index_row_bytes, SparseCacheRole.INDEXER, False))
        for name, row_bytes, role, leader in shapes:
            specs[f"model.layers.{layer}.self_attn.{name}"] = MLAAttentionSpec(
                block_size=64,
                num_kv_heads=1,
                head_size=row_bytes,
                dtype=torch.uint8,
                cache_role=role,
                is_index_group_leader=leader,
            )
    for group in get_hisparse_kv_cache_groups(vllm_config, specs) or []:
        for name in group.layer_names:
            specs.setdefault(name, group.kv_cache_spec)
    return specs


def at_once(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class ProbeExecutor(SimulatedExecutor):
    """Samples in its own call, as GPU workers do with asynchronous scheduling."""

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        return [layer_specs(self.vllm_config)]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        (self.plan,) = kv_cache_configs
        super().initialize_from_config(kv_cache_configs)

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        self._output = self._run(scheduler_output)
        computes = scheduler_output.total_num_scheduled_tokens > 0
        return at_once(None if computes else self._output)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return at_once(self._output)


def node_config(profile: Path, folder: Path) -> NodeConfig:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(GLM_CONFIG))
    config = load_node_config(profile, memory_bytes=2**50).value
    return config.model_copy(
        update={
            "model": str(model),
            "state_dir": folder,
            "engine_args": {"skip_tokenizer_init": True},
        }
    )


class Probe:
    """One engine core over what a launch built."""

    def __init__(self, vllm_config: Any) -> None:
        register()
        vllm_config.additional_config["hisparsed"] |= {
            "node": load_node_description("8xh200-glm-5.3").model_dump(mode="json"),
            "seed": 0,
            "stands_for": 1.0,
        }
        self.core: Any = EngineCore(vllm_config, ProbeExecutor, log_stats=True)
        coordinator = get_hisparse_coordinator(self.core.scheduler.kv_cache_manager)
        self.core.model_executor.bind(
            ManagersResidency(coordinator.resident_managers[0], coordinator.hot_managers[0], 64)
        )

    def report(self) -> EngineReport:
        return report_from_wire(control(self.core, "report", {}))

    def serve(self, name: str) -> dict[str, int | None]:
        """One call to its end: tokens that came out, and prompt tokens that were held already."""
        self.core.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=list(range(TURN_TOKENS)),
                sampling_params=SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True),
                pooling_params=None,
                block_hasher=self.core.request_block_hasher,
            )
        )
        tokens, held = 0, None
        for _ in range(500):
            if not self.core.scheduler.has_requests():
                break
            outputs, executed = self.core.step_fn()
            self.core.post_step(executed)
            for of_client in (outputs or {}).values():
                for output in of_client.outputs:
                    tokens += len(output.new_token_ids)
                    if output.prefill_stats is not None:
                        held = int(output.prefill_stats.num_cached_tokens)
        return {"tokens": tokens, "held": held}


def config_facts(built: Any) -> dict[str, Any]:
    hisparse, scheduler = built.attention_config.hisparse_config, built.scheduler_config
    return {
        "connectors": [
            entry["kv_connector"]
            for entry in built.kv_transfer_config.kv_connector_extra_config["connectors"]
        ],
        "load_failure": built.kv_transfer_config.kv_load_failure_policy,
        "hot_rows": hisparse.device_buffer_size,
        "eager": hisparse.eager_host_mirror,
        "scheduler": scheduler.scheduler_cls.rpartition(".")[2],
        "async": bool(scheduler.async_scheduling),
        "reserve_full_isl": bool(scheduler.scheduler_reserve_full_isl),
        "batched_tokens": scheduler.max_num_batched_tokens,
        "hybrid_off": bool(scheduler.disable_hybrid_kv_cache_manager),
        "block_tokens": built.cache_config.block_size,
        "cache_dtype": built.cache_config.cache_dtype,
        "graphs": built.compilation_config.cudagraph_mode.name,
        "executor": built.parallel_config.distributed_executor_backend,
        "ranks": built.parallel_config.world_size,
        "speculative": [
            built.speculative_config.method,
            built.speculative_config.num_speculative_tokens,
        ],
    }


def plan_facts(plan: Any) -> dict[str, Any]:
    """The allocations that vLLM's planner sent to the workers."""
    return {
        "groups": len(plan.kv_cache_groups),
        "gpu_block_bytes": sorted(
            {tensor.block_stride for tensor in plan.kv_cache_tensors if not tensor.host_resident}
        ),
        "gpu_blocks": plan.num_blocks,
        "host_blocks": plan.hisparse_host_num_blocks,
        "host_block_stride": plan.hisparse_host_block_stride,
        "shared_pool": bool(plan.hisparse_shared_host_pool),
    }


def tiny_facts(folder: Path) -> dict[str, Any]:
    profile = shipped_config("profiles/one-gpu-tiny.yaml")
    config = load_node_config(profile, memory_bytes=2**50).value
    built = launch.vllm_config(
        config.model_copy(update={"state_dir": folder / "tiny"}), max_multiplier=2.0
    )
    return {
        "name": built.model_config.served_model_name,
        "load_format": str(built.load_config.load_format),
        "hot_rows": built.attention_config.hisparse_config.device_buffer_size,
        "executor": built.parallel_config.distributed_executor_backend,
        "layers": built.model_config.get_num_layers(built.parallel_config),
        "head_bytes": facts_of(built.model_config.hf_config.to_dict()).row_bytes("fp8_ds_mla"),
    }


def frontend_facts(profile: Path) -> dict[str, Any]:
    """What the profile says of vLLM's OpenAI application, as this vLLM takes it."""
    found = frontend_arguments(load_node_config(profile, memory_bytes=2**50).value, "cuda")
    return {
        "tool_call_parser": found.tool_call_parser,
        "enable_auto_tool_choice": found.enable_auto_tool_choice,
        "enable_prompt_tokens_details": found.enable_prompt_tokens_details,
        "allowed_origins": found.allowed_origins,
    }


def main() -> None:
    folder = Path(sys.argv[2])
    config = node_config(Path(sys.argv[1]), folder)
    built = launch.vllm_config(config, max_multiplier=5.0)
    facts: dict[str, Any] = {"config": config_facts(built)}
    facts["tiny"] = tiny_facts(folder)
    facts["frontend"] = frontend_facts(Path(sys.argv[1]))
    probe = Probe(built)
    facts["plan"] = plan_facts(probe.core.model_executor.plan)
    facts["scheduler"] = [one.__name__ for one in type(probe.core.scheduler).__mro__[:3]]
    facts["first"] = probe.serve("first")
    budget = probe.report().geometry.budget_blocks
    control(probe.core, "apply", {"offload_target_blocks": budget // 20})
    facts["second"] = probe.serve("second")
    facts["third"] = probe.serve("third")
    report = probe.report()
    facts["geometry"] = asdict(report.geometry) | {"floor_blocks": report.hisparse.floor_blocks}
    facts["lent_blocks"] = report.offload.lent_blocks
    facts["stored_chunks"] = report.offload.stored_chunks
    facts["violations"] = [one.rule for one in report.ledger.violations]
    print(json.dumps(facts), flush=True)  # noqa: T201 (this is what the tests read)
    # vLLM's shutdown empties a GPU's cache, and there is none.
    os._exit(0)


if __name__ == "__main__":
    main()
