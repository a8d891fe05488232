"""The map of the multiplier: the closed form is the simulated node's, and oracles know what they
claim to know."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from hisparsed.config.node_description import NodeDescription, load_node_description
from hisparsed.engine.simulated.cost import CostModel, RowModel
from hisparsed.engine.simulated.work import StepPart, StepWorker, WorkTotals
from tests.bench import multiplier_simulated
from tests.bench.multiplier_corners import (
    ACROSS_NODES,
    AT_RANDOM,
    MIXES,
    Corner,
    Setting,
    Sizes,
    evaluate,
    gain,
    mixed,
    most_hidden,
    settings,
    single,
    singles_by,
    sizes_of,
    to_simulate,
    traffics,
)
from tests.bench.multiplier_live import LiveNode, at_rest, knowing, shared_gain, shipped_policy
from tests.bench.multiplier_map import TABLES, chosen_table
from tests.bench.multiplier_model import ClosedForm, Traffic, variant
from tests.bench.multiplier_simulated import corner_trace, kept, path_of, simulate
from tests.bench.study import with_table

DOCUMENT = Path(__file__).parents[2] / "docs" / "figures" / "multiplier.md"
AGENTS = Traffic(context=65_536, answer=2_000, first=0.0, users=40)


@pytest.fixture(scope="module")
def h200() -> NodeDescription:
    return load_node_description("8xh200-glm-5.3")


@pytest.fixture(scope="module")
def corners(h200: NodeDescription) -> list[Sizes]:
    """Of two nodes."""
    few = [Setting(0, hidden, 1.0, 0.0) for hidden in (0.0, 0.9)]
    return evaluate(h200, few)


class Managers:
    """A request's residency, the same for all."""

    def __init__(self, resident: float, rows: int) -> None:
        self._resident, self._rows = resident, rows

    def resident_share(self, request_id: str) -> float:
        return self._resident

    def hot_rows(self, request_id: str) -> int:
        return self._rows


def simulated_step_s(form: ClosedForm, traffic: Traffic, size: float, decoding: int) -> float:
    """The simulated node's cost of a step with this many decoding requests."""
    node, steady = form.node, form.steady(traffic, size)
    assert steady is not None
    on_gpu = steady.resident_rows / (steady.resident_rows + steady.from_host_rows)
    rows, topk = node.rows, node.model.topk
    worker = StepWorker(
        RowModel(topk, rows.miss_curve, rows.union),
        Managers(on_gpu, round(size * topk) if steady.leased else 0),
        node.engine.block_tokens,
        topk,
        node.engine.max_num_batched_tokens,
        lambda _request_id: 1.0,
    )
    drafts, end = node.engine.speculative_tokens, traffic.context + traffic.answer // 2
    parts = [
        StepPart(str(number), end - 1 - drafts, 1 + drafts, drafts, end - drafts)
        for number in range(decoding)
    ]
    return CostModel(node).step(worker.of(parts, WorkTotals())).total_s


def test_a_step_costs_what_the_simulated_node_charges(h200: NodeDescription) -> None:
    draw = random.Random(0)
    alike = [one for one in settings(h200) if not one.spread]
    compared = 0
    while compared < 40:
        form = ClosedForm(draw.choice(alike).of(h200))
        traffic, size = draw.choice(traffics(h200)), draw.choice(sizes_of(h200))
        steady = form.steady(traffic, size)
        if steady is None:
            continue
        # The mean number of decoding requests is between two whole ones.
        fewer = int(steady.decoding)
        low, high = (
            simulated_step_s(form, traffic, size, fewer + more) if fewer + more else 0.0
            for more in (0, 1)
        )
        if fewer:
            between = low + (steady.decoding - fewer) * (high - low)
            assert steady.decode_step_s == pytest.approx(between, rel=2e-3)
            compared += 1


def test_as_many_run_as_the_blocks_hold(h200: NodeDescription) -> None:
    """At 64K of context: 1,040 pages of the indexer, 20 groups of two tail pages, and the buffers
    in 90,662 blocks, of which one prompt's chunk takes 240."""
    form = ClosedForm(h200)
    running = {size: form.steady(AGENTS, size).running for size in (2.0, 5.0)}  # type: ignore[union-attr]
    assert running == {2.0: 38, 5.0: 21}


def test_what_fits_the_gpu_has_no_buffers_and_no_size(h200: NodeDescription) -> None:
    few = replace(AGENTS, context=16_384, answer=200, users=8)
    found = {ClosedForm(h200).steady(few, size) for size in (1.0, 5.0, 10.0)}
    assert len(found) == 1
    (steady,) = found
    assert steady is not None
    assert not steady.leased
    assert steady.missed_rows == 0


def test_what_does_not_fit_serves_nothing(h200: NodeDescription) -> None:
    small = h200.model_copy(update={"gpu": h200.gpu.model_copy(update={"kv_memory": 1 << 29})})
    assert ClosedForm(small).steady(AGENTS, 5.0) is None


def test_more_chunks_than_steps_share_them(h200: NodeDescription) -> None:
    """Answers of one step: all steps compute prompts, and a call costs its share of the tokens."""
    form = ClosedForm(h200)
    steady = form.steady(replace(AGENTS, answer=2), 5.0)
    assert steady is not None
    assert steady.prefill_share == 1
    assert steady.calls_per_s * steady.step_s > 1
    first = form.steady(replace(AGENTS, answer=2, first=1.0), 5.0)
    assert first is not None
    # Most of the step's tokens are prompts: the node cannot compute more of them.
    assert first.step_tokens > 0.9 * h200.engine.max_num_batched_tokens


def test_hidden_reads_cost_nothing(h200: NodeDescription) -> None:
    every = ClosedForm(variant(h200, drafts=3, hidden=1.0)).steady(AGENTS, 1.0)
    waiting = ClosedForm(variant(h200, drafts=3, hidden=0.0)).steady(AGENTS, 1.0)
    assert every is not None
    assert waiting is not None
    assert every.loaded_bytes == waiting.loaded_bytes
    read_s = waiting.loaded_bytes / h200.gpu.row_read_bandwidth
    assert waiting.decode_step_s - every.decode_step_s == pytest.approx(read_s)


def test_vllm_hides_nothing_with_drafts(h200: NodeDescription) -> None:
    assert most_hidden(h200, 3) == 0
    # 57 of 78 layers have a layer with an indexer before them.
    assert most_hidden(h200, 0) == pytest.approx(57 / 78)


def corner(setting: Setting | None = None, **changes: int) -> Corner:
    return Corner(setting or Setting(0, 0.0, 1.0, 0.0), replace(AGENTS, **changes))


def test_an_oracle_gains_what_one_size_loses() -> None:
    small = Sizes(corner(), {1.0: 100.0, 2.0: 90.0, 4.0: 50.0})
    large = Sizes(corner(answer=9), {2.0: 80.0, 4.0: 100.0})
    every = [small, large]
    # 1x serves nothing of the second.
    assert single(every) == 2.0
    assert gain(every, lambda _one: 2.0) == pytest.approx(1 / 0.85 - 1)
    assert gain(every, lambda one: one.best) == 0
    apart = singles_by(every, lambda one: one.traffic.answer)
    assert [apart(one) for one in every] == [1.0, 4.0]


def test_the_map_has_every_corner_and_its_mixes(
    h200: NodeDescription, corners: list[Sizes]
) -> None:
    assert len(corners) == len({one.corner for one in corners})
    # Eight calls of 16K fit the GPU whole, with any answer but the longest.
    whole = set(traffics(h200)) - {one.corner.traffic for one in corners}
    assert {(one.context, one.users) for one in whole} == {(16_384, 8)}
    assert len(corners) == 2 * (len(traffics(h200)) - len(whole))
    mine = [one for one in corners if one.corner.setting == corners[0].corner.setting]
    assert {name: len(mixed(mine, name)) for name in MIXES} == {
        name: len(parts) for name, parts in MIXES.items()
    }


def test_what_is_simulated_is_chosen_by_rule(corners: list[Sizes]) -> None:
    chosen = to_simulate(corners)
    assert chosen == to_simulate(list(corners))
    assert len(chosen) == 2 + ACROSS_NODES + AT_RANDOM
    # Of each node the corner where its own best size loses most.
    for one in chosen[:2]:
        mine = [other for other in corners if other.corner.setting == one.corner.setting]
        assert one.share(single(mine)) == min(other.share(single(mine)) for other in mine)
    across = chosen[2 : 2 + ACROSS_NODES]
    assert len({one.corner.traffic for one in across}) == ACROSS_NODES


def test_the_law_rests_near_the_best_size_where_nothing_is_hidden(h200: NodeDescription) -> None:
    form = ClosedForm(h200)
    best = max(
        steady.calls_per_s * 3600
        for size in sizes_of(h200)
        if (steady := form.steady(AGENTS, size)) is not None
    )
    assert at_rest(form, shipped_policy(), AGENTS) > 0.97 * best


def test_the_law_shrinks_hidden_buffers_once_it_knows_the_wait(h200: NodeDescription) -> None:
    form, policy = ClosedForm(variant(h200, drafts=3, hidden=0.9)), shipped_policy()
    blind, sighted = LiveNode(form, policy), LiveNode(form, knowing(policy, form.node))
    calls = [one.run(AGENTS, 600) for one in (blind, sighted)]
    assert blind.multiplier > sighted.multiplier
    assert calls[0] < calls[1]


def test_sharing_gains_only_where_requests_differ(h200: NodeDescription) -> None:
    policy = shipped_policy()
    assert shared_gain(ClosedForm(h200), policy, AGENTS, 5.0) == 1
    differing = ClosedForm(variant(h200, drafts=3, hidden=0.0, spread=1.0))
    assert shared_gain(differing, policy, AGENTS, 5.0) > 1


@pytest.mark.long
def test_the_document_has_the_tables_that_the_command_makes(h200: NodeDescription) -> None:
    text, corners = DOCUMENT.read_text("utf-8"), evaluate(h200, settings(h200))
    for name, table in TABLES.items():
        if name in ("oracle", "settings", "traffic"):
            assert with_table(text, name, table(h200, corners)) == text
        else:
            assert with_table(text, name, "\n")


def test_corners_that_were_not_simulated_have_empty_cells(
    corners: list[Sizes], tmp_path: Path
) -> None:
    (one,) = to_simulate(corners)[:1]
    row = chosen_table(corners, [one], tmp_path).rstrip().splitlines()[-1]
    assert row.endswith("|  |  |  |")
    assert "simulated" not in row
    path = path_of(tmp_path, one.corner, f"{one.best:g}")
    tokens_per_s = one.calls[one.best] * one.corner.traffic.answer / 3600
    path.write_text(json.dumps({"tokens_per_s": 1.1 * tokens_per_s}))
    assert "simulated +10.0% |" in chosen_table(corners, [one], tmp_path)


def test_a_call_of_a_corner_finds_all_but_its_own_tokens() -> None:
    (session,) = corner_trace(replace(AGENTS, first=0.1), 64).sessions
    first, second = session.calls[0], session.calls[1]
    assert first.input_tokens == second.input_tokens == AGENTS.context
    same, own = first.blocks
    assert second.blocks[0] == same
    assert second.blocks[1].first >= own.first + own.count
    assert (same.count + own.count) * 64 == AGENTS.context


@pytest.mark.engine
@pytest.mark.long
def test_the_simulated_node_serves_what_the_closed_form_says(
    h200: NodeDescription, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr(multiplier_simulated, "COUNTED_S", 20.0)
    monkeypatch.setattr(multiplier_simulated, "_LEAST_WARMUP_S", 10.0)
    place = Corner(Setting(0, 0.5, 1.0, 0.0), Traffic(16_384, 2_000, 0.0, 24))
    steady = ClosedForm(place.setting.of(h200)).steady(place.traffic, 4.0)
    assert steady is not None
    simulate(h200, place, "4", tmp_path)
    found = kept(tmp_path, place, "4")
    assert found == pytest.approx(steady.calls_per_s * place.traffic.answer, rel=0.05)
