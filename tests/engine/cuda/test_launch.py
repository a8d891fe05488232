"""The shipped profile of eight H200, taken as far as a machine without GPUs lets it.

That is an engine core of vLLM's that serves calls under our scheduler, connectors and ledger.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_trees import environment_of, versions

from hisparsed.config.node import shipped_config
from hisparsed.config.node_description import load_node_description
from hisparsed.plan.layout import real_layout

PROBE = Path(__file__).with_name("launch_probe.py")
BUDGET_BYTES = 512 * 2**30

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture(scope="module", params=versions())
def probe(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the probe found, run by that version's Python over the installed compiled parts."""
    profile = shipped_config("profiles/8xh200-glm-5.3.yaml")
    result = subprocess.run(
        [sys.executable, str(PROBE), str(profile), str(tmp_path_factory.mktemp("launch"))],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env=environment_of(request.param, tmp_path_factory.mktemp("over")),
    )
    assert result.returncode == 0, result.stderr[-4000:]
    facts: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return facts


def test_vllm_takes_the_configuration_as_it_was_meant(probe: dict[str, Any]) -> None:
    assert probe["config"] == {
        "connectors": ["HiSparseConnector", "OffloadingConnector"],
        "load_failure": "recompute",
        "hot_rows": 5 * 2048,
        "eager": True,
        "scheduler": "HisparsedAsyncScheduler",
        "async": True,
        "reserve_full_isl": True,
        "batched_tokens": 8192,
        "hybrid_off": False,
        "block_tokens": 64,
        "cache_dtype": "fp8_ds_mla",
        "graphs": "FULL_AND_PIECEWISE",
        "executor": "mp",
        "ranks": 8,
        "speculative": ["mtp", 3],
    }


def test_vllm_has_the_parsers_of_the_profile_and_lets_no_other_site_in(
    probe: dict[str, Any],
) -> None:
    assert probe["frontend"] == {
        "tool_call_parser": "glm47",
        "enable_auto_tool_choice": True,
        "enable_prompt_tokens_details": True,
        "allowed_origins": [],
    }


def test_vllms_planner_lays_glm_out_as_the_plan_says(probe: dict[str, Any]) -> None:
    plan, ours = probe["plan"], real_layout(load_node_description("8xh200-glm-5.3"), 1)
    assert plan["gpu_block_bytes"] == [ours.gpu_block_bytes] == [209_920]
    assert plan["gpu_blocks"] == ours.gpu_blocks
    # The MTP layer is one source layer, one indexer and one hot group more than the description.
    assert plan["groups"] == 2 + 2 * (ours.hot_groups + 1)
    mtp_page = 64 * 656
    stride = -(-(78 * mtp_page + mtp_page) // 4096) * 4096
    assert plan["host_block_stride"] == stride
    assert plan["host_blocks"] == BUDGET_BYTES // stride


def test_ranks_share_one_pool_of_the_whole_budget(probe: dict[str, Any]) -> None:
    assert probe["plan"]["shared_pool"]


def test_the_engine_core_runs_our_scheduler_over_vllms(probe: dict[str, Any]) -> None:
    assert probe["scheduler"] == [
        "HisparsedAsyncScheduler",
        "ControlledScheduler",
        "AsyncScheduler",
    ]


def test_the_report_has_the_nodes_real_sizes(probe: dict[str, Any]) -> None:
    geometry = probe["geometry"]
    # Block 0 is vLLM's null block.
    assert geometry["budget_blocks"] == probe["plan"]["host_blocks"] - 1
    assert geometry["offload_chunk_bytes"] == 22 * 132 * 64
    assert geometry["chunks_per_host_block"] == 79 * 64 * 656 // (22 * 132 * 64)
    assert geometry["offload_copies"] == 1
    assert geometry["decode_query_len"] == 4
    assert geometry["max_lease_blocks"] == 5 * 2048 // 64
    assert geometry["min_lease_rows"] == 4 * 2048
    assert geometry["floor_blocks"] == -(-142_000 // 64) + 2


def test_calls_are_served_with_drafts_and_hit_what_was_kept(probe: dict[str, Any]) -> None:
    assert [probe[name]["tokens"] for name in ("first", "second", "third")] == [20, 20, 20]
    assert probe["first"]["held"] == 0
    # Whole blocks of 3000 tokens, less the one that is recomputed and the drafts' look-back.
    assert probe["second"]["held"] == probe["third"]["held"] == 45 * 64


def test_chunks_are_stored_in_blocks_that_were_lent_meanwhile(probe: dict[str, Any]) -> None:
    assert probe["lent_blocks"] == probe["geometry"]["budget_blocks"] // 20
    assert probe["stored_chunks"] >= 3000 // 64
    assert probe["violations"] == []


def test_the_tiny_model_of_one_gpu_is_one_that_vllm_knows(probe: dict[str, Any]) -> None:
    assert probe["tiny"] == {
        "name": "hisparsed-tiny-dsa",
        "load_format": "dummy",
        "hot_rows": 2 * 512,
        "executor": "uni",
        "layers": 8,
        "head_bytes": 656,
    }
