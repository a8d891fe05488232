"""vLLM's scheduler in virtual time: prefixes come back, drafts settle, equal seeds are equal."""

from __future__ import annotations

import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from small import LAYERS, agents, chat, small_node
from typer.testing import CliRunner
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from hisparsed.cli.app import app
from hisparsed.config.node import shipped_config
from hisparsed.config.node_description import load_node_description
from hisparsed.control.journal.replay import replay_journal
from hisparsed.engine.simulated import node as simulated_node
from hisparsed.engine.simulated.node import RememberedLookups, SimulatedCall, SimulatedNode
from hisparsed.engine.simulated.vllm_config import SimulatedOptions
from hisparsed.errors import UserError
from hisparsed.plan.layout import real_layout
from hisparsed.policy.decisions import EngineCommand
from hisparsed.policy.effective import load_policy
from hisparsed.simulate.policies import choose_policy
from hisparsed.simulate.results import Limits, Measures, PolicyResult, finished_calls, summarise
from hisparsed.simulate.run import run_policy
from hisparsed.simulate.scenario import Scenario, Traffic
from hisparsed.simulate.workload import TraceSessions
from hisparsed.tui.journal_reader import JournalReader

pytestmark = pytest.mark.engine


def started(folder: Path, **changes: Any) -> SimulatedNode:
    node = small_node()
    options: dict[str, Any] = {
        "node": node,
        "model_folder": folder / "model",
        "host_budget_bytes": node.host.budget,
        "max_lease_rows": 320,
        "max_model_len": 4096,
        **changes,
    }
    simulated = SimulatedNode(SimulatedOptions(**options))
    if simulated.hisparse:
        simulated.put(EngineCommand(offload_target_blocks=16))
    return simulated


def call(name: str, tokens: int, answer: int = 100) -> SimulatedCall:
    blocks = [b"%d" % block for block in range(100)]
    return SimulatedCall(name, blocks, tokens, answer)


def finish(node: SimulatedNode) -> dict[str, tuple[int, int]]:
    """Tokens emitted and found in caches, by request."""
    found: dict[str, tuple[int, int]] = {}
    for _ in range(3000):
        if not node.busy:
            return found
        emitted, executed = node.step()
        for one in emitted:
            tokens, cached = found.get(one.request_id, (0, 0))
            found[one.request_id] = (tokens + one.tokens, cached + (one.cached_tokens or 0))
        if not executed:
            node.clock.advance_to(node.next_copy_done_s() or node.clock.now_s() + 0.01)
    raise AssertionError("the node does not come to an end")


def test_a_prefix_and_its_answer_come_back_from_the_pools(tmp_path: Path) -> None:
    node = started(tmp_path)
    node.add(call("first", 1500))
    assert finish(node) == {"first": (100, 0)}
    node.add(call("second", 1700))
    # All full blocks of 1,599 tokens: the last token of an answer is never computed.
    assert finish(node)["second"] == (100, 1536)
    node.shutdown()


def test_drafts_bring_several_tokens_a_step_and_never_too_many(tmp_path: Path) -> None:
    node = started(tmp_path)
    node.add(call("one", 500, answer=500))
    assert finish(node)["one"][0] == 500
    assert 500 / 4 < node.tally.steps < 500 / 2
    node.shutdown()


def test_a_command_takes_no_time_of_this_machine(tmp_path: Path) -> None:
    node = started(tmp_path)
    assert node.put(EngineCommand(offload_target_blocks=20)).apply_us == 0
    node.shutdown()


@pytest.mark.parametrize("hisparse", [True, False])
def test_all_that_goes_to_the_host_goes_over_one_link(tmp_path: Path, hisparse: bool) -> None:
    rate = 1_000_000
    node = started(tmp_path, node=small_node(gpu={"copy_bandwidth": rate}), hisparse=hisparse)
    node.add(call("first", 700, answer=2))
    finish(node)
    # Ten full blocks, each whole though eight GPUs hold it: one of them writes.
    assert node.copied_bytes() >= 10 * 64 * LAYERS * small_node().model.row_bytes
    assert node.clock.now_s() >= node.copied_bytes() / rate
    node.shutdown()


def test_the_layout_that_plan_counts_is_vllms(tmp_path: Path) -> None:
    described = load_node_description("8xh200-glm-5.3")
    node = SimulatedNode(
        SimulatedOptions(described, tmp_path, 64 << 30, 10_240, 131_072, scale=Fraction(1, 8))
    )
    manager = node._scheduler.kv_cache_manager
    groups = manager.kv_cache_config.kv_cache_groups
    strides = {tensor.block_stride for tensor in manager.kv_cache_config.kv_cache_tensors}
    layout = real_layout(described, 1)
    assert layout.gpu_block_bytes in strides
    assert len(groups) == 2 + 2 * layout.hot_groups
    geometry = node.take_report().geometry
    assert geometry.hot_groups == layout.hot_groups
    assert geometry.gpu_blocks_total == layout.gpu_blocks // 8
    node.shutdown()


def scenario(**changes: Any) -> Scenario:
    node = small_node()
    values: dict[str, Any] = {
        "node": node,
        "traffic": (Traffic(TraceSessions(agents(6, 6), 64), 6),),
        "host_budget": node.host.budget,
        "duration_s": 40.0,
        "warmup_s": 10.0,
        **changes,
    }
    return Scenario(**values)


def run(folder: Path, policy: str, seed: int = 0, **changes: Any) -> Measures:
    return run_policy(scenario(**changes), choose_policy(policy), seed, work_folder=folder)


def summary(measures: Measures) -> PolicyResult:
    return summarise("p", 6, 0, measures, scale=Fraction(1), copy_bandwidth=5e10, limits=Limits())


@pytest.mark.long
def test_equal_seeds_give_equal_runs_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(seconds: float) -> None:
        raise AssertionError(f"slept {seconds} s")

    monkeypatch.setattr(time, "sleep", forbidden)
    short = {"duration_s": 20.0, "warmup_s": 5.0}
    one, same, other = (run(tmp_path, "policy", seed, **short) for seed in (0, 0, 1))
    assert one.calls == same.calls
    assert one.samples == same.samples
    assert one.sentences == same.sentences
    assert one.calls != other.calls
    assert summary(one).calls > 5


def test_stock_vllm_moves_nothing(tmp_path: Path) -> None:
    measures = run(tmp_path, "stock")
    assert {one.offload_blocks for one in measures.samples} == {measures.samples[0].offload_blocks}
    assert measures.moves == 0
    assert measures.sentences == []
    assert finished_calls(measures)


@pytest.mark.long
def test_without_hisparse_all_kv_is_on_the_gpu_and_prefixes_come_back(tmp_path: Path) -> None:
    assert summary(run(tmp_path, "standard")).prefix_hit_tokens > 0
    node = started(tmp_path, hisparse=False)
    node.add(call("one", 1500))
    finish(node)
    assert node.tally.selected == node.tally.resident > 0
    node.shutdown()


@pytest.mark.long
def test_a_fixed_split_stays_where_it_is_put(tmp_path: Path) -> None:
    measures = run(tmp_path, "policy,pools.hisparse=60%")
    shares = {
        round(one.offload_blocks / (one.offload_blocks + one.hisparse_blocks), 2)
        for one in measures.samples
    }
    assert shares == {0.4}


@pytest.mark.long
def test_too_small_an_offload_pool_costs_prefixes(tmp_path: Path) -> None:
    ample = summary(run(tmp_path, "policy,pools.hisparse=85%"))
    tiny = summary(run(tmp_path, "policy,pools.hisparse=99%"))
    assert tiny.prefix_hit_tokens < ample.prefix_hit_tokens / 2


@pytest.mark.long
def test_traffic_that_changes_kind_reaches_the_node(tmp_path: Path) -> None:
    change = (
        Traffic(TraceSessions(agents(6, 6), 64), 6, until_s=20.0),
        Traffic(TraceSessions(chat(40, 0.5), 64), None, from_s=20.0),
    )
    measures = run(tmp_path, "policy", traffic=change)
    early = {call.play[0] for call in measures.calls if call.arrived_s < 20}
    late = {call.play[0] for call in measures.calls if call.arrived_s > 20}
    assert (early, late) == ({"0"}, {"1"})


@pytest.mark.long
def test_new_sessions_beyond_the_limit_are_refused_and_come_again(tmp_path: Path) -> None:
    crowded = (Traffic(TraceSessions(agents(6, 2, first=1800), 64), 30),)
    limits = "admission.order=held-prefix-first,admission.max_waiting_sessions=1"
    measures = run(tmp_path, f"policy,{limits},admission.retry_after=2s", traffic=crowded)
    assert measures.refused > 0
    assert max(one.waiting for one in measures.samples) < 10
    free = run(tmp_path, "policy", traffic=crowded)
    assert free.refused == 0


def test_a_journal_opens_like_that_of_a_real_node(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    measures = run_policy(
        scenario(), choose_policy("policy"), 0, work_folder=tmp_path, journal_folder=folder
    )
    assert measures.journal_lost == 0
    replay = replay_journal(folder, load_policy(shipped_config("policy.yaml")))
    assert replay.ticks >= 39
    assert replay.end_unix_s - replay.begin_unix_s == pytest.approx(replay.ticks - 1, abs=1)
    assert replay.parted == 0
    assert len(JournalReader(folder / "journal.sqlite").ids) == replay.ticks
    told = CliRunner().invoke(app, ["explain", "--journal", str(folder), "--all", "--last", "1000"])
    assert told.exit_code == 0, told.output
    assert "Started with" in told.output


def test_a_scale_that_cannot_hold_one_call_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--scale: 1/100"):
        run(tmp_path, "stock", scale=Fraction(1, 100))


def test_every_answer_is_vllms_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More sessions that the pools hold, so prefixes are lost while calls wait."""
    node = small_node()
    remembered = RememberedLookups.find_longest_cache_hit
    asked: list[int] = []

    def compared(self: Any, **question: Any) -> Any:
        found = remembered(self, **question)
        own = FullAttentionManager.find_longest_cache_hit(**question)
        assert found == own
        assert all(a is b for a, b in zip(found[0][0], own[0][0], strict=True))
        asked.append(own[1])
        return found

    monkeypatch.setattr(simulated_node.RememberedLookups, "find_longest_cache_hit", compared)
    traffic = (Traffic(TraceSessions(agents(9, 6, first=1200), 64), 9),)
    scenario = Scenario(node, traffic, node.host.budget, duration_s=40.0, warmup_s=10.0)
    run_policy(scenario, choose_policy("policy"), 0, work_folder=tmp_path)
    assert len(asked) > 1000
    assert len(set(asked)) > 8
