"""Refusals of a CUDA node before anything is taken: the place, the value, the expected value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eight_h200 import GLM_CONFIG

from hisparsed.config.node import NodeConfig, load_node_config, shipped_config
from hisparsed.config.sections import DisaggregationConfig
from hisparsed.engine.cuda import checks, launch, model_config
from hisparsed.engine.cuda.checks import GpuFacts, MachineFacts
from hisparsed.engine.cuda.model_config import ModelFacts, facts_of, read_model
from hisparsed.errors import UserError

GIB = 2**30
H200 = GpuFacts(141 * GIB, (9, 0))
MACHINE = MachineFacts(2000 * GIB, 1000 * GIB, (H200,) * 8)
GLM = facts_of(GLM_CONFIG, weights_bytes=750 * 10**9)
START, HIGHEST = 5.0, 10.0
"""Of the shipped policy with three drafts, in top-k."""


def node(**changes: Any) -> NodeConfig:
    cuda = {"tensor_parallel_size": 8, "max_model_len": 142_000, "speculative_tokens": 3}
    document = {"node": "cuda", "model": "/models/glm", "host_budget": "512GiB", "cuda": cuda}
    document["cuda"] = cuda | changes.pop("cuda", {})
    return NodeConfig.model_validate(document | changes)


def problems(
    config: NodeConfig,
    *,
    model: ModelFacts = GLM,
    machine: MachineFacts = MACHINE,
    multiplier: float = START,
    environ: Mapping[str, str] | None = None,
) -> list[str]:
    return [
        *checks.argument_problems(config),
        *checks.environment_problems(environ or {}),
        *checks.model_problems(config, model, multiplier),
        *checks.machine_problems(config, machine),
        *checks.size_problems(config, model, machine, multiplier),
    ]


def test_the_published_node_can_start() -> None:
    assert problems(node()) == []


@pytest.mark.parametrize(
    ("name", "machine", "model"),
    [
        ("8xh200-glm-5.3", MACHINE, GLM),
        ("one-gpu-tiny", replace(MACHINE, gpus=(H200,)), facts_of(model_config.tiny_config())),
        (
            "one-gpu-tiny",
            MachineFacts(8 * GIB, 0, (GpuFacts(24 * GIB, (8, 9)),)),
            facts_of(model_config.tiny_config()),
        ),
    ],
)
def test_shipped_profiles_can_start_where_they_say(
    name: str, machine: MachineFacts, model: ModelFacts
) -> None:
    config = load_node_config(
        shipped_config(f"profiles/{name}.yaml"), memory_bytes=machine.available_bytes
    ).value
    assert problems(config, model=model, machine=machine, multiplier=2.0) == []
    assert config.policy.is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tensor_parallel_size": 8}, ("set cuda.tensor_parallel_size",)),
        ({"compilation_config": {"cudagraph_mode": 2}}, ("FULL_AND_PIECEWISE",)),
        ({"speculative_config": {"method": "mtp"}}, ("set cuda.speculative_tokens",)),
        ({"block_size": 64}, ("remove it",)),
        ({"worker_extension_cls": "x.Y"}, ("remove it",)),
        ({"pipeline_parallel_size": 2}, ("2 cannot be", "cuda.tensor_parallel_size")),
        ({"decode_context_parallel_size": 8}, ("8 cannot be", "remove it")),
        ({"prefill_context_parallel_size": 2}, ("2 cannot be", "remove it")),
        ({"data_parallel_size": 2}, ("2 cannot be", "a node for each replica")),
        ({"nnodes": 2}, ("2 cannot be", "one machine")),
        ({"scheduler_reserve_full_isl": False}, ("False cannot be", "host blocks")),
        ({"enable_prefix_caching": False}, ("False cannot be", "host pools")),
        ({"attention_config": {"hisparse_config": {}}}, ("set cuda.hot_rows",)),
        ({"compilation_config": {"cudagraph_mode": "FULL"}}, ("FULL_AND_PIECEWISE",)),
        ({"compilation_config": '{"cudagraph_mode": "full"}'}, ("FULL_AND_PIECEWISE",)),
    ],
)
def test_an_argument_that_cannot_be_is_refused_by_name(
    arguments: dict[str, Any], words: tuple[str, ...]
) -> None:
    (problem,) = problems(node(engine_args=arguments))
    assert problem.startswith(f"engine_args.{next(iter(arguments))}")
    for word in words:
        assert word in problem


@pytest.mark.parametrize(
    "arguments",
    [
        {"pipeline_parallel_size": 1, "data_parallel_size": None, "enable_prefix_caching": True},
        {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}},
        {"compilation_config": 3, "attention_config": {"backend": "FLASHMLA_SPARSE"}},
        {"enforce_eager": True, "enable_expert_parallel": True, "load_format": "dummy"},
    ],
)
def test_other_arguments_pass(arguments: dict[str, Any]) -> None:
    assert problems(node(engine_args=arguments)) == []


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        ({"enable_dbo": True}, True),
        ({"ubatch_size": 2}, True),
        ({"enable_dbo": False, "ubatch_size": 0}, False),
        ({"ubatch_size": 1}, False),
    ],
)
def test_two_half_batches_at_once_are_for_vllms_kernels(
    arguments: dict[str, Any], refused: bool
) -> None:
    for kernels in ("auto", "hisparsed"):
        found = problems(node(engine_args=arguments, cuda={"kernels": kernels}))
        assert [one.partition(":")[0] for one in found] == (
            [f"engine_args.{next(iter(arguments))}"] if refused else []
        )
        assert all(f"cuda.kernels: {kernels}; " in one for one in found)
    assert problems(node(engine_args=arguments, cuda={"kernels": "vllm"})) == []


def test_the_first_model_runner_is_refused() -> None:
    (problem,) = problems(node(), environ={"VLLM_USE_V2_MODEL_RUNNER": "0"})
    assert problem.startswith("VLLM_USE_V2_MODEL_RUNNER")
    assert problems(node(), environ={"VLLM_USE_V2_MODEL_RUNNER": "1"}) == []


def fetching(
    environ: Mapping[str, str] | None = None, *, nixl_is_there: bool = True, **own: Any
) -> list[str]:
    """What is wrong with a section ``disaggregation``."""
    config = DisaggregationConfig.model_validate({"role": "decode"} | own)
    return list(checks.disaggregation_problems(config, environ or {}, nixl_is_there=nixl_is_there))


def test_prefixes_are_fetched_before_the_offload_pool_is_asked() -> None:
    own = DisaggregationConfig(role="decode", nixl={"backends": ["UCX"]})
    children = launch.kv_transfer_config(GIB, "vllm", own)["kv_connector_extra_config"]
    assert [one["kv_connector"] for one in children["connectors"]] == [
        "HiSparseConnector",
        "NixlConnector",
        "OffloadingConnector",
    ]
    nixl = children["connectors"][1]
    assert nixl["kv_role"] == "kv_consumer"
    assert nixl["kv_connector_extra_config"] == {"backends": ["UCX"]}


def test_a_decode_node_can_start_and_a_prefill_node_cannot() -> None:
    assert fetching() == []
    assert list(checks.disaggregation_problems(None, {}, nixl_is_there=False)) == []
    (said,) = fetching(role="prefill")
    assert said.startswith('disaggregation.role: "prefill" cannot be on a cuda node')
    assert "vllm serve" in said


def test_what_a_decode_node_lacks_is_said_with_what_would_be_right() -> None:
    (said,) = fetching(nixl_is_there=False)
    assert "pip install nixl" in said
    (said,) = fetching(nixl={"bidirectional_kv_xfer": True})
    assert said.startswith("disaggregation.nixl.bidirectional_kv_xfer: True cannot be")
    (said,) = fetching(nixl={"enforce_handshake_compat": False})
    assert said.startswith("disaggregation.nixl.enforce_handshake_compat: False cannot be")
    environ = {"VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"}
    (said,) = fetching(environ)
    assert said == (
        "VLLM_NIXL_SIDE_CHANNEL_PORT: '5600' is not disaggregation.port, 14579; unset it"
    )
    assert fetching(environ, port=5600) == []


def test_scratch_is_refused_where_nobody_reads_through_it() -> None:
    (problem,) = problems(node(cuda={"hot_scratch": True, "kernels": "vllm"}))
    assert problem.startswith("cuda.hot_scratch: vLLM's kernels")
    assert "cuda.kernels: hisparsed" in problem
    for kernels in ("hisparsed", "auto"):
        assert problems(node(cuda={"hot_scratch": True, "kernels": kernels})) == []


def test_a_model_without_an_indexer_is_refused() -> None:
    (problem,) = problems(node(), model=replace(GLM, index_topk=None, model_type="llama"))
    assert "/models/glm (llama) has no index_topk" in problem


def test_a_model_that_hisparse_does_not_know_is_refused() -> None:
    (problem,) = problems(node(), model=replace(GLM, model_type="deepseek_v4"))
    assert "does not know deepseek_v4" in problem


def test_drafts_need_an_mtp_layer() -> None:
    (problem,) = problems(node(), model=replace(GLM, draft_layers=0))
    assert problem.startswith("cuda.speculative_tokens")
    assert "set it to 0" in problem


def test_more_context_than_the_model_knows_is_refused() -> None:
    (problem,) = problems(node(cuda={"max_model_len": 300_000}))
    assert problem == "cuda.max_model_len: the model knows 202752 positions; set at most that"


@pytest.mark.parametrize(("rows", "refused"), [(8191, True), (8192, False)])
def test_a_hot_buffer_holds_what_one_step_may_select(rows: int, refused: bool) -> None:
    found = problems(node(cuda={"hot_rows": rows}))
    assert [one.startswith("cuda.hot_rows: 8191 rows do not hold") for one in found] == (
        [True] if refused else []
    )


@pytest.mark.parametrize(("rows", "refused"), [(2**15 + 1, True), (2**15, False)])
def test_a_hot_buffer_has_no_more_rows_than_int16_can_number(rows: int, refused: bool) -> None:
    found = problems(node(cuda={"hot_rows": rows}))
    assert any("give at most 32768 (16 x top-k)" in one for one in found) == refused


@pytest.mark.parametrize(("capability", "refused"), [((9, 0), False), ((12, 0), True)])
def test_a_hot_buffer_fits_the_kernels_shared_memory(
    capability: tuple[int, int], refused: bool
) -> None:
    machine = replace(MACHINE, gpus=(GpuFacts(141 * GIB, capability),) * 8)
    found = problems(node(cuda={"hot_rows": 20_480}), machine=machine)
    assert any("114212 B of shared memory" in one for one in found) == refused


@pytest.mark.parametrize(("kernels", "place"), [("vllm", "hot.start"), ("hisparsed", "hot.max")])
def test_rows_that_the_policy_asks_for_are_refused_in_its_name(kernels: str, place: str) -> None:
    found = problems(node(cuda={"kernels": kernels}), multiplier=17.0)
    assert [one.partition(":")[0] for one in found] == [f"{place} of the policy"]


@pytest.mark.parametrize(
    ("multiplier", "rows"), [(5.0, 10_240), (1.0, 8_192), (5.0001, 10_241), (10.0, 20_480)]
)
def test_rows_follow_the_policy_but_cover_one_step(multiplier: float, rows: int) -> None:
    assert checks.hot_rows(node(), 2048, multiplier) == rows


@pytest.mark.parametrize(("free_gib", "refused"), [(538, True), (540, False)])
def test_the_budget_is_the_nodes_and_not_each_ranks(free_gib: int, refused: bool) -> None:
    found = problems(node(), machine=replace(MACHINE, available_bytes=free_gib * GIB))
    assert [one.partition(":")[0] for one in found] == (["host_budget"] if refused else [])


def test_shared_memory_must_hold_the_pool_where_ranks_share_it() -> None:
    small = replace(MACHINE, shm_free_bytes=64 * GIB)
    (problem,) = problems(node(), machine=small)
    assert "where the ranks share it, has 64GiB" in problem
    alone = node(cuda={"tensor_parallel_size": 1, "speculative_tokens": 0})
    assert not any("ranks share it, has" in one for one in problems(alone, machine=small))


def test_fewer_gpus_than_ranks_are_refused() -> None:
    (problem,) = problems(node(), machine=replace(MACHINE, gpus=(H200,) * 4))
    assert problem.startswith("cuda.tensor_parallel_size: 8 GPUs are requested and 4 can be used")


def test_the_budget_holds_one_longest_request() -> None:
    block = -(-79 * 64 * 656 // 4096) * 4096
    least = (-(-142_000 // 64) + 2) * block
    assert problems(node(host_budget=least)) == []
    (problem,) = problems(node(host_budget=least - 1))
    assert "cannot hold one request of 142000 tokens, 2221 blocks" in problem


def test_weights_that_no_gpu_holds_are_refused() -> None:
    few = node(cuda={"tensor_parallel_size": 4})
    (problem,) = problems(few, machine=replace(MACHINE, gpus=(H200,) * 4))
    assert problem.startswith("cuda.tensor_parallel_size")
    assert "use more GPUs" in problem


def test_facts_follow_from_config_json() -> None:
    assert (GLM.layers, GLM.index_leaders, GLM.draft_layers) == (78, 21, 1)
    assert (GLM.row_bytes("fp8_ds_mla"), GLM.row_bytes("bfloat16")) == (656, 1152)
    assert GLM.index_row_bytes == 132


@pytest.mark.parametrize(
    ("sharing", "leaders"),
    [
        ({"index_topk_freq": 1}, 8),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, 4),
        ({"index_topk_pattern": "FSSSFSS"}, 3),
    ],
)
def test_index_sharing_is_read_as_vllm_reads_it(sharing: dict[str, Any], leaders: int) -> None:
    config = {"num_hidden_layers": 8, "index_topk": 2048, **sharing}
    assert facts_of(config).index_leaders == leaders


def test_a_folder_that_is_none_and_one_without_a_config_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        read_model(str(tmp_path / "missing"))
    with pytest.raises(UserError, match=r"has no config\.json"):
        read_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        read_model(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"index_topk": "many"}, "'many'"),
        ({"num_hidden_layers": []}, "'list'"),
        ({"text_config": "glm"}, "'str'"),
    ],
)
def test_a_config_with_something_else_than_numbers_is_told_by_its_file(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=rf"^model: .*config\.json: .*{words}.* are numbers$"):
        read_model(str(tmp_path))


def test_a_top_k_where_hisparse_does_not_look_is_refused(tmp_path: Path) -> None:
    """vLLM reads it from the outer config alone."""
    (tmp_path / "config.json").write_text(json.dumps({"text_config": GLM_CONFIG}))
    facts = read_model(str(tmp_path))
    assert facts is not None
    assert facts.index_topk == GLM_CONFIG["index_topk"]
    (problem,) = checks.model_problems(node(), facts, 5.0)
    assert problem.startswith("model: ")
    assert "has index_topk in its text_config alone" in problem


def test_a_name_is_left_for_vllm_to_look_up() -> None:
    assert read_model("zai-org/GLM-5.3-FP8") is None


def test_weights_are_the_size_of_their_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GLM_CONFIG))
    for number in range(2):
        (tmp_path / f"model-{number}.safetensors").write_bytes(b"x" * 10)
    facts = read_model(str(tmp_path))
    assert facts is not None
    assert facts.weights_bytes == 20


def test_everything_that_is_wrong_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "read_machine_facts", lambda: replace(MACHINE, gpus=()))
    config = node(model=model_config.TINY_MODEL, engine_args={"pipeline_parallel_size": 2})
    with pytest.raises(UserError) as refused:
        launch.require_startable(config, max_multiplier=START)
    places = [line.partition(":")[0] for line in str(refused.value).splitlines()]
    assert places == [
        "cuda.tensor_parallel_size",
        "engine_args.pipeline_parallel_size",
        "cuda.max_model_len",
    ]


def test_kernels_that_know_one_size_start_with_the_policys_start() -> None:
    class Policy:
        def highest_multiplier(self, decode_query_len: int) -> float:
            return 2.0 * (decode_query_len + 1)

        def start_multiplier(self, decode_query_len: int) -> float:
            return 1.0 * (decode_query_len + 1)

    assert launch.asked_multiplier(node(), Policy()) == START
    assert launch.asked_multiplier(node(cuda={"kernels": "hisparsed"}), Policy()) == HIGHEST
