"""A short soak on real engines is clean, and each kind of damage makes it unclean."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from hisparsed.soak.engine import InProcessEngine, Oracle
from hisparsed.soak.run import Soak, soak_on_engines
from hisparsed.soak.settings import SoakSettings
from hisparsed.soak.workload import SoakTraffic

pytestmark = pytest.mark.engine

SETTINGS = SoakSettings(
    seed=4, max_steps=320, moves_every_s=0.04, quiet_every_s=3, quiet_s=0.8, sample_share=0.4
)
DAMAGED = SoakSettings(seed=5, max_steps=120, moves_every_s=0.05, sample_share=1.0)


@pytest.fixture(scope="module")
def first() -> Iterator[Soak]:
    with soak_on_engines(SETTINGS) as soak:
        yield soak


def core_of(soak: Soak) -> Any:
    assert isinstance(soak.engine, InProcessEngine)
    return soak.engine.core


@pytest.fixture
def again(first: Soak) -> Soak:
    """Another soak on the same engines. Damage stays in them, so each does one kind more."""
    traffic = SoakTraffic(
        DAMAGED.trace, seed=DAMAGED.seed, clients=16, cancel_share=0.1, max_model_len=1024
    )
    oracle = Oracle(first.oracle._engine)
    return Soak(DAMAGED, first.engine, first.clock, oracle, traffic, first.time_s, first.busy_s)


def test_random_moves_lose_nothing(first: Soak) -> None:
    first.run()
    tally = first.tally
    assert tally.violations == []
    assert first.differences == []
    assert tally.stuck == 0
    assert first.clean
    assert tally.moves > 60
    assert tally.requests > 20
    assert first.oracle.verified > 10
    assert first.traffic.cancels > 3
    assert first.traffic.reconnects > 2
    assert tally.resets > 0
    assert tally.residency == {"full", "mixed", "none"}
    assert tally.gaps_quiet_s
    assert tally.gaps_moving_s
    assert tally.last is not None
    assert tally.last.requests.preemptions_total > 0
    json.dumps([move.payload for move in first.moves_made])


@pytest.mark.long
def test_rows_that_do_not_reach_the_host_show_as_token_differences(
    again: Soak, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = core_of(again).model_executor._store
    mirror = store.mirror_rows
    monkeypatch.setattr(store, "mirror_rows", lambda mirrors: mirror(mirrors[1:]))
    again.run()
    assert again.tally.token_differences == len(again.differences) > 0
    assert not again.clean
    for difference in again.differences:
        assert difference.expected[: difference.at] == difference.sample.tokens[: difference.at]
        assert difference.expected != difference.sample.tokens


def test_a_block_that_is_lost_on_its_way_back_is_a_violation(
    again: Soak, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = core_of(again).scheduler.hisparsed.host.pool
    give_back = pool.give_back
    monkeypatch.setattr(pool, "give_back", lambda block_ids: give_back(block_ids[1:]))
    again.run()
    assert any("held-adds-up" in one for one in again.tally.violations), again.tally.violations
    assert not again.clean
    assert again.tally.steps < DAMAGED.max_steps, "a broken ledger ends the soak"
