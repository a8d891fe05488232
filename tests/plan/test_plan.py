"""`hisparsed plan` reproduces what vLLM publishes and lays out, and says which limit binds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hisparsed.cli.app import app
from hisparsed.config.node import shipped_config
from hisparsed.config.node_description import (
    NodeDescription,
    load_node_description,
    shipped_nodes,
)
from hisparsed.errors import UserError
from hisparsed.plan.layout import packed_groups, published_layout, real_layout
from hisparsed.plan.sizing import Limit, Plan, concurrency, make_plan
from hisparsed.plan.text import plan_text
from hisparsed.policy.problems import ConfigError

CONTEXTS = [8_192, 83_968, 142_000, 262_144, 1_048_576]
NODE = "8xh200-glm-5.3"


@pytest.fixture(scope="module")
def h200() -> NodeDescription:
    return load_node_description(NODE)


def plan_of(node: NodeDescription, multiplier: float, gib: int = 512) -> Plan:
    return make_plan(node, CONTEXTS, multiplier=multiplier, host_budget=gib << 30)


def test_block_bytes_are_the_published_ones(h200: NodeDescription) -> None:
    layout = published_layout(h200)
    assert layout.baseline_block_bytes == 3_052_800
    assert layout.gpu_block_bytes == 184_320
    assert layout.host_block_bytes == 2_875_392
    assert layout.hot_groups == 20


@pytest.mark.parametrize(
    ("multiplier", "hybrid_gpu"), [(2, [71, 39, 29, 19, 5]), (5, [30, 22, 18, 14, 5])]
)
def test_concurrency_is_the_published_calculators(
    h200: NodeDescription, multiplier: float, hybrid_gpu: list[int]
) -> None:
    contexts = plan_of(h200, multiplier).contexts
    assert [one.context for one in contexts] == CONTEXTS
    assert [one.baseline for one in contexts] == [48, 4, 2, 1, 0]
    assert [one.hybrid_gpu for one in contexts] == hybrid_gpu
    assert [one.result for one in contexts] == [
        max(one.baseline, min(256, one.hybrid_gpu, one.hybrid_host)) for one in contexts
    ]


@pytest.mark.parametrize(("multiplier", "requests"), [(1, 31), (2, 25), (5, 16)])
def test_real_blocks_admit_fewer_than_published(
    h200: NodeDescription, multiplier: float, requests: int
) -> None:
    plan = plan_of(h200, multiplier)
    assert plan.real.hisparse_gpu == 209_920
    assert plan.contexts[2].laid_out.hybrid_gpu == requests


def test_host_memory_is_padded_to_pages_and_counts_copies(h200: NodeDescription) -> None:
    one, eight = real_layout(h200, 1), real_layout(h200, 8)
    assert one.host_block_bytes == 3_276_800
    assert one.chunk_bytes == 180_224
    assert eight.chunk_bytes * 8 == 1_421_312


def test_equal_reach_is_70_30_with_stock_copies_and_95_5_with_one(h200: NodeDescription) -> None:
    one, stock = plan_of(h200, 2).split
    assert (one.copies, stock.copies) == (1, 8)
    assert one.hisparse_share == pytest.approx(0.95, abs=0.005)
    assert stock.hisparse_share == pytest.approx(0.70, abs=0.005)
    assert one.reach_tokens / stock.reach_tokens == pytest.approx(1.36, abs=0.005)


def test_each_limit_can_bind(h200: NodeDescription) -> None:
    layout = published_layout(h200)

    def binds(context: int, rows: int, gib: int, most: int) -> Limit:
        return concurrency(
            layout, context, hot_rows=rows, hisparse_bytes=gib << 30, max_num_seqs=most
        ).binds

    assert binds(142_000, 4096, 512, 256) is Limit.GPU_BLOCKS
    assert binds(142_000, 4096, 32, 256) is Limit.HOST
    assert binds(142_000, 4096, 512, 8) is Limit.MAX_NUM_SEQS
    assert binds(8_192, 10_240, 512, 256) is Limit.BASELINE


def test_vllm_runs_no_more_than_max_num_seqs_though_the_calculator_says_so(
    h200: NodeDescription,
) -> None:
    (one,) = make_plan(h200, [1], multiplier=2, host_budget=512 << 30).contexts
    assert (one.result, one.binds) == (6260, Limit.BASELINE)
    assert one.laid_out.baseline == 5536
    assert (one.laid_out.result, one.laid_out.binds) == (256, Limit.MAX_NUM_SEQS)


def test_hot_groups_pack_neighbours_that_fit_beside_the_indexer_page() -> None:
    assert packed_groups([1, 1, 4, 4], page_bytes=10, indexer_bytes=45) == [2, 4, 4]
    assert packed_groups([1, 1, 1], page_bytes=10, indexer_bytes=45) == [3]
    assert packed_groups([5], page_bytes=10, indexer_bytes=45) == [5]


@pytest.mark.parametrize("name", shipped_nodes())
def test_shipped_nodes_load_and_plan(name: str) -> None:
    node = load_node_description(name)
    plan = make_plan(node, [142_000], multiplier=2, host_budget=node.host.budget)
    assert plan.contexts[0].laid_out.result > 1
    assert node.title in plan_text(plan)


def test_json_has_one_object_a_context_in_the_order_asked() -> None:
    arguments = ["plan", "--node", NODE, "--context", "142000", "--context", "8192", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    contexts = json.loads(result.output)["contexts"]
    assert [one["context"] for one in contexts] == [142_000, 8_192]
    keys = {"context", "baseline", "hybrid_gpu", "hybrid_host", "result", "binds"}
    assert keys <= contexts[0].keys()
    assert contexts[0]["binds"] == "gpu-blocks"


def test_a_multiplier_that_stock_vllm_refuses_is_told(h200: NodeDescription) -> None:
    below = plan_text(plan_of(h200, 3.9))
    assert "stock vLLM leases 5x here, 4x at least; 3.9x is hisparsed's alone" in below
    assert "alone" not in plan_text(plan_of(h200, 4))


def test_a_wrong_question_names_option_and_value(h200: NodeDescription) -> None:
    with pytest.raises(UserError, match=r"--multiplier: 0\.5"):
        make_plan(h200, [8_192], multiplier=0.5, host_budget=1 << 40)
    for value in ("nan", "inf"):
        with pytest.raises(UserError, match=f"--multiplier: {value}"):
            plan_of(h200, float(value))
    with pytest.raises(UserError, match=r"--multiplier: 1e\+308 .* at most 512"):
        plan_of(h200, 1e308)
    with pytest.raises(UserError, match="--context: 2000000"):
        make_plan(h200, [2_000_000], multiplier=2, host_budget=1 << 40)
    with pytest.raises(UserError, match=f"'9xh200'.*{NODE}"):
        load_node_description("9xh200")


@pytest.mark.parametrize(
    ("text", "message"),
    [("512", "add a unit: 512GiB"), ("much", "such as 4GiB"), ("0GiB", "such as 512GiB")],
)
def test_a_wrong_host_budget_says_what_is_right(text: str, message: str) -> None:
    found = str(CliRunner().invoke(app, ["plan", "--host-budget", text]).exception)
    assert found.startswith("--host-budget: ")
    assert message in found


def test_contexts_are_none_that_a_small_model_cannot_have(tmp_path: Path) -> None:
    text = shipped_config(f"nodes/{NODE}.yaml").read_text()
    path = tmp_path / "node.yaml"
    path.write_text(text.replace("max_model_len: 1048576", "max_model_len: 8192"))
    result = CliRunner().invoke(app, ["plan", "--node", str(path), "--json"])
    assert [one["context"] for one in json.loads(result.output)["contexts"]] == [8192]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("acceptance: [80%, 70%, 60%]", "acceptance: [80%]", "3 speculative tokens"),
        ("union: [1.0, 1.35, 1.65, 1.91]", "union: [1.0]", "steps of 4 rows"),
        ("[2, 13.4%]", "[2, 40%]", "misses do not"),
        ("count: 8", "count: 0", "gpu.count"),
        ("layers: 78", "layers: 100000000000", "model.layers"),
        ("max_num_seqs: 256", "max_num_seqs: 100000000", "engine.max_num_seqs"),
        ("fp8_tflops: 1979", "fp8_tflops: .inf", "gpu.fp8_tflops"),
        ("index_row_bytes: 132", "index_row_bytes: 2437", "model.index_row_bytes"),
        ("experts_per_token: 8", "experts_per_token: 300", "300 is more than the 256 experts"),
    ],
)
def test_a_wrong_description_names_the_key(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    text = shipped_config(f"nodes/{NODE}.yaml").read_text()
    path = tmp_path / "node.yaml"
    path.write_text(text.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_node_description(str(path))
    assert message in str(caught.value)
