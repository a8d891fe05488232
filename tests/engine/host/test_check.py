"""A broken ledger: moves stop, requests are served on, and only a sound one moves again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from conversations import apply, build_engine, report, text
from scripted_workers import SMALL_NODE, ScriptedWorkers

pytestmark = pytest.mark.engine

SHAPE = replace(SMALL_NODE, host_budget_bytes=8 << 20)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build_engine(tmp_path_factory.mktemp("watch"), SHAPE)


@pytest.fixture
def workers(engine: Any) -> Iterator[ScriptedWorkers]:
    workers = ScriptedWorkers(engine)
    yield workers
    workers.run()
    apply(engine, {"clear_violations": True, "offload_target_blocks": 0})


def test_a_violation_is_reported_and_stops_every_lever(
    engine: Any, workers: ScriptedWorkers
) -> None:
    apply(engine, {"offload_target_blocks": 40})
    workers.host.pool.referenced_blocks += 1
    seen = report(engine)
    assert [one["rule"] for one in seen["ledger"]["violations"]] == ["budget-adds-up"]
    assert "are not the budget of" in seen["ledger"]["violations"][0]["sentence"]
    with pytest.raises(ValueError, match="levers are frozen: the host ledger broke budget-adds-up"):
        apply(engine, {"multiplier": 2.0})
    with pytest.raises(ValueError, match="levers are frozen"):
        apply(engine, {"clear_violations": True})
    workers.host.ledger.set_offload_target(0)
    assert report(engine)["offload"]["lent_blocks"] == 40, "no block changes its tenant"
    workers.host.pool.referenced_blocks -= 1


def test_requests_are_served_on_while_the_levers_are_frozen(
    engine: Any, workers: ScriptedWorkers
) -> None:
    apply(engine, {"offload_target_blocks": 40})
    workers.host.pool.referenced_blocks += 1
    report(engine)
    workers.admit(text(150, seed=1), 10)
    workers.run()
    assert workers.tokens == 10
    assert workers.unfinished == []
    workers.host.pool.referenced_blocks -= 1


def test_thawing_takes_a_sound_ledger(engine: Any, workers: ScriptedWorkers) -> None:
    apply(engine, {"offload_target_blocks": 40})
    workers.host.pool.referenced_blocks += 1
    before = report(engine)["ledger"]["violations_total"]
    workers.host.pool.referenced_blocks -= 1
    assert report(engine)["ledger"]["violations"], (
        "not by itself, even when nothing is found any more"
    )
    result = apply(engine, {"clear_violations": True, "offload_target_blocks": 10})
    assert result["lent_blocks"] == 10
    after = report(engine)
    assert (after["ledger"]["violations"], after["ledger"]["violations_total"]) == ([], before)


def test_a_violation_counts_once_while_it_lasts(engine: Any, workers: ScriptedWorkers) -> None:
    before = report(engine)["ledger"]["violations_total"]
    workers.host.pool.referenced_blocks += 1
    for _ in range(5):
        report(engine)
    workers.host.pool.referenced_blocks -= 1
    assert report(engine)["ledger"]["violations_total"] == before + 1


def test_a_wrong_block_is_found_within_a_round_of_reports(
    engine: Any, workers: ScriptedWorkers
) -> None:
    apply(engine, {"offload_target_blocks": 40})
    victim = workers.host.pool.blocks[300]
    assert victim.ref_cnt == 0
    victim.ref_cnt = 1
    rounds = 0
    while not report(engine)["ledger"]["violations"]:
        rounds += 1
        assert rounds < 50
    assert report(engine)["ledger"]["violations"][0]["rule"] == "free-means-unused"
    assert (
        "host block 300 has 1 references" in report(engine)["ledger"]["violations"][0]["sentence"]
    )
    victim.ref_cnt = 0


def test_a_leaked_reference_is_found_by_a_whole_check(
    engine: Any, workers: ScriptedWorkers
) -> None:
    leaked = workers.host.pool.get_new_blocks(1)
    assert report(engine)["ledger"]["violations"] == []
    (found,) = workers.host.watch.look_at_everything()
    assert found.rule == "owners-account-for-use"
    workers.host.pool.free_blocks(leaked)
