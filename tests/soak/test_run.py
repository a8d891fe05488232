"""The actions of a soak and the faults that it counts, on an engine without a model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine

from hisparsed.engine.messages import command_to_wire
from hisparsed.policy.decisions import EngineCommand
from hisparsed.policy.signals import RequestHot
from hisparsed.soak.engine import Oracle, SampledAnswer, SteppedClock
from hisparsed.soak.result import percentile
from hisparsed.soak.run import Soak, save_record
from hisparsed.soak.settings import SoakSettings
from hisparsed.soak.workload import Moves, Reset, SoakCall, SoakTraffic

SETTINGS = SoakSettings(seed=1, max_steps=400, moves_every_s=0.1, sample_share=1.0, stuck_after_s=5)


class Ticking:
    """A machine's clock on which every look takes a millisecond."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


def soak(engine: FakeEngine, **changes: Any) -> Soak:
    settings = replace(SETTINGS, **changes)
    traffic = SoakTraffic(
        settings.trace,
        seed=settings.seed,
        clients=settings.clients,
        cancel_share=settings.cancel_share,
        max_model_len=1024,
    )
    clock = SteppedClock()
    return Soak(settings, engine, clock, Oracle(FakeEngine()), traffic, Ticking(), Ticking())


def result(done: Soak) -> Any:
    return done.tally.result(
        done.settings,
        seconds=1.0,
        verified=done.oracle.verified,
        cancels=done.traffic.cancels,
        reconnects=done.traffic.reconnects,
        interrupted=done.stop,
        record=None,
    )


def test_a_sound_engine_is_clean_and_every_call_is_answered_cut_or_verified() -> None:
    engine = FakeEngine()
    done = soak(engine)
    done.run()
    found = result(done)
    assert found.clean
    assert found.requests > 40
    assert found.verified >= found.requests
    assert found.moves == len(engine.commands) - 1 + engine.resets == len(done.moves_made) > 40
    assert found.cancels == len(engine.aborted) > 1
    assert not engine.open
    assert found.steps >= 400
    assert json.loads(json.dumps(found.to_dict()))["token_differences"] == 0


def test_the_same_seed_makes_the_same_calls_and_moves() -> None:
    runs = [soak(FakeEngine()), soak(FakeEngine()), soak(FakeEngine(), seed=2)]
    for one in runs:
        one.run()
    assert runs[0].moves_made == runs[1].moves_made
    assert runs[0].tally.requests == runs[1].tally.requests
    assert runs[0].moves_made != runs[2].moves_made


def test_a_wrong_token_is_a_difference_that_names_the_call_and_the_place() -> None:
    engine = FakeEngine()
    engine.wrong = {"call-3"}
    done = soak(engine, cancel_share=0.0)
    done.run()
    (difference,) = done.differences
    assert difference.sample.request_id == "call-3"
    assert difference.at == 0
    assert result(done).token_differences == 1
    assert not result(done).clean


def test_a_call_that_gets_no_token_is_stuck_while_others_go_on() -> None:
    engine = FakeEngine()
    engine.deaf = {"call-2"}
    done = soak(engine, cancel_share=0.0)
    done.run()
    assert done.tally.stuck == 1
    assert done.tally.requests > 40
    assert "call-2" in engine.aborted


def test_an_engine_that_serves_nobody_ends_the_soak() -> None:
    engine = FakeEngine()
    engine.deaf = {f"call-{number}" for number in range(1000)}
    done = soak(engine, max_steps=100_000, cancel_share=0.0)
    done.run()
    assert done.tally.stuck > 0
    assert done.tally.requests == 0
    assert done.tally.steps < 1000
    assert not result(done).clean


def test_a_soak_in_which_everything_is_wrong_ends() -> None:
    engine = FakeEngine()
    engine.wrong = {f"call-{number}" for number in range(100_000)}
    done = soak(engine, max_steps=100_000)
    done.run()
    assert 20 < done.tally.token_differences < 60
    assert done.tally.steps < 1000


def test_a_broken_ledger_ends_the_soak() -> None:
    engine = FakeEngine()
    engine.broken = ["held-adds-up: 3 and 4 are not 8"]
    done = soak(engine)
    done.run()
    assert "held-adds-up" in done.tally.violations[0]
    assert done.tally.steps < 50
    assert not done.clean


def test_what_the_engine_itself_found_ends_the_soak_too() -> None:
    engine = FakeEngine()
    engine.watched = ["floor-kept"]
    done = soak(engine)
    done.run()
    assert done.tally.violations == ["step 0: floor-kept: found by the watch"]


def test_blocks_that_stay_in_use_after_the_last_call_are_a_violation() -> None:
    engine = FakeEngine()
    engine.leak = 2
    done = soak(engine)
    done.run()
    assert done.tally.violations == ["after the last call: 2 host blocks in use"]


def test_refused_commands_are_counted_and_the_soak_goes_on() -> None:
    engine = FakeEngine()
    engine.refusing = True
    done = soak(engine)
    done.run()
    assert done.tally.moves_refused > sum(one.kind == "apply" for one in done.moves_made) > 30
    assert done.tally.requests > 40


def test_nothing_moves_in_quiet_windows_and_gaps_are_told_apart() -> None:
    done = soak(FakeEngine(), quiet_every_s=2.0, quiet_s=1.0)
    done.run()
    assert {(one.step * 0.02) % 2.0 < 1.0 for one in done.moves_made} == {True}
    assert len(done.tally.gaps_quiet_s) > 100
    assert len(done.tally.gaps_moving_s) > 100


def test_an_interrupted_soak_lets_open_calls_end() -> None:
    engine = FakeEngine()
    done = soak(engine, max_steps=10_000)

    def stop_at_step_50(tally: Any) -> None:
        done.stop = tally.steps >= 50

    done.on_progress = stop_at_step_50
    done.run()
    assert 50 <= done.tally.steps < 400
    assert not engine.open
    assert result(done).interrupted


def test_the_record_tells_how_to_see_it_again(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.wrong = {"call-3"}
    done = soak(engine, cancel_share=0.0)
    done.run()
    record = json.loads(save_record(done, tmp_path).read_text("utf-8"))
    assert record["settings"]["seed"] == 1
    assert record["steps"] == done.tally.steps
    assert len(record["moves"]) == done.tally.moves
    assert record["differences"][0]["sample"]["request_id"] == "call-3"


def test_moves_reach_every_lever_and_beyond_every_bound() -> None:
    report = FakeEngine().report()
    moves = Moves(0, report)
    last = replace(
        report,
        hot=replace(report.hot, lease_blocks=3),
        requests_hot=tuple(RequestHot(name, 3, 3) for name in "abc"),
    )
    drawn = [moves.next(last) for _ in range(3000)]
    commands = [one for one in drawn if isinstance(one, EngineCommand)]
    resets = {one for one in drawn if isinstance(one, Reset)}
    levers = {
        "offload_target_blocks",
        "reserve_target_blocks",
        "release_reserve",
        "multiplier",
        "hot_leases",
        "watermark",
        "admission",
    }
    assert {name for one in commands for name in command_to_wire(one)} == levers
    assert len(resets) == 4
    leases = [one.hot_leases for one in commands if one.hot_leases]
    assert {name for one in leases for name in one} == {"a", "b", "c"}
    assert {sum(one.values()) for one in leases} == {6}, "what one gets another gives"
    assert {blocks for one in leases for blocks in one.values()} == {2, 3, 4}
    assert {} in [one.hot_leases for one in commands]
    assert max(one.offload_target_blocks or 0 for one in commands) > 990
    assert {one.admission.order for one in commands if one.admission} == {
        "arrival",
        "held-prefix-first",
    }


def test_the_oracle_verifies_cut_answers_as_far_as_they_came() -> None:
    oracle = Oracle(FakeEngine())
    cut = SampledAnswer("a", 1, (9, 9, 9), (3, 4))
    longer = SampledAnswer("b", 2, (9, 9, 9), (3, 4, 5, 7))
    assert oracle.take(cut) == oracle.take(longer) == []
    (difference,) = oracle.settle()
    assert (difference.sample, difference.at) == (longer, 3)
    assert difference.expected == (3, 4, 5, 6)
    assert oracle.verified == 2


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 50), (0.99, 99), (1.0, 100)])
def test_percentiles_are_values_that_occurred(share: float, expected: float) -> None:
    assert percentile(list(range(1, 101)), share) == expected
    assert percentile([], share) is None


def test_a_reconnect_sends_the_same_prompt_again() -> None:
    traffic = SoakTraffic(SETTINGS.trace, seed=3, clients=4, cancel_share=1.0, max_model_len=1024)
    sent: dict[str, SoakCall] = {}
    for tick in range(500):
        now_s = tick * 0.02
        sent |= {call.request_id: call for call in traffic.due(now_s)}
        for name in traffic.to_cancel(now_s):
            traffic.cancelled(sent[name], now_s)
    assert traffic.reconnects > 10
    assert len({call.prompt for call in sent.values()}) < len(sent)


def test_a_soak_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="needs an end"):
        SoakSettings(seed=0)
