"""From report to snapshot, and the result of a command: every figure is in the right field."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from hisparsed.control.journal.records import Applied
from hisparsed.control.observe import bounded_levers, confirm, notable_levers, observe
from hisparsed.engine.messages import (
    command_from_wire,
    command_to_wire,
    report_from_wire,
    report_to_wire,
)
from hisparsed.engine.port import ServingCounters
from hisparsed.policy.decisions import EngineCommand, Reason
from hisparsed.policy.forecasts import Figure, Outcome
from hisparsed.policy.signals import (
    AdmissionOrder,
    AdmissionRules,
    Latencies,
    LeasePoint,
    Ledger,
    LedgerViolation,
    Lever,
    Prefix,
    RequestHot,
    SampledRows,
    Tokens,
)

ADMISSION = AdmissionRules(AdmissionOrder.ARRIVAL, 12.0, 5, 2, 7.0)


async def test_a_snapshot_is_the_report_and_what_the_daemon_knows(node: Any) -> None:
    node.engine.order = AdmissionOrder.HELD_PREFIX_FIRST
    report = await node.engine.report()
    sampled = SampledRows(3, 1, 656, 40.0)
    snapshot = observe(
        report,
        ServingCounters(
            prompt_tokens=11,
            generated_tokens=12,
            prefix_query_tokens=13,
            prefix_hit_tokens=14,
            refused=3,
            ttft_sum_s=1.5,
            ttft_count=2,
            itl_sum_s=2.5,
            itl_count=9,
            sampled_rows=sampled,
        ),
        at_s=5.0,
        report_age_s=0.5,
        tick=3,
        policy_generation=2,
        last_admission=ADMISSION,
        frozen_levers=frozenset({Lever.SPLIT}),
    )
    added = {"requests", "admission"}
    for one in fields(report):
        if one.name not in added:
            assert getattr(snapshot, one.name) == getattr(report, one.name)
    assert snapshot.requests == replace(report.requests, refused_total=3)
    assert snapshot.admission == AdmissionRules(AdmissionOrder.HELD_PREFIX_FIRST, 12.0, 8, 2, 7.0)
    assert (snapshot.prefix, snapshot.tokens) == (Prefix(14, 13), Tokens(11, 12))
    assert (snapshot.latencies, snapshot.sampled_rows) == (Latencies(1.5, 2, 2.5, 9), sampled)
    assert (snapshot.live_levers, snapshot.frozen_levers) == (set(Lever), {Lever.SPLIT})
    assert (snapshot.tick, snapshot.policy_generation, snapshot.report_age_s) == (3, 2, 0.5)


async def test_a_report_crosses_to_the_daemon_whole(node: Any) -> None:
    report = replace(
        await node.engine.report(),
        requests_hot=(RequestHot("r1", 4, 6, (LeasePoint(4, 9.5),)),),
        ledger=Ledger((LedgerViolation("rule", "Why."),), 1, 2),
    )
    wire = report_to_wire(report)
    assert json.loads(json.dumps(wire)) == wire
    assert report_from_wire(wire) == report
    del wire["report_cost_s"]
    assert report_from_wire(wire | {"of_next_year": 1}) == replace(report, report_cost_s=0.0)
    wire["geometry"]["topk"] = 0
    with pytest.raises(ValueError, match=r"geometry\.topk is 0"):
        report_from_wire(wire)


@pytest.mark.parametrize(
    "command",
    [
        EngineCommand(),
        EngineCommand(clear_violations=True),
        EngineCommand(offload_target_blocks=0, hisparse_target_blocks=9, release_reserve=False),
        EngineCommand(multiplier=1.5, hot_leases={}, watermark=0),
        EngineCommand(hot_leases={"r1": 4}, watermark="default", admission=ADMISSION),
    ],
)
def test_a_command_is_the_same_behind_the_wire(command: EngineCommand) -> None:
    wire = command_to_wire(command)
    assert command_from_wire(json.loads(json.dumps(wire))) == command
    assert bool(wire) == bool(command)


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        ({"offload_target_blocks": -1}, "offload_target_blocks is -1"),
        ({"multiplier": 0}, "multiplier is 0"),
        ({"watermark": "high"}, "watermark"),
        ({"multiplyer": 2, "admision": {}}, "a command has no admision, multiplyer"),
        ({"admission": {"order": "arrival", "ageing_s": 0, "max_running": 1}}, "ageing_s is 0"),
        ({"admission": {"order": "arrival", "ageing_s": 1, "max_running": 0}}, "max_running is 0"),
        (
            {"admission": {
                "order": "arrival", "ageing_s": 1, "max_running": 1, "oldest_share": 1.5,
            }},
            "oldest_share is 1.5",
        ),
    ],
)  # fmt: skip
def test_a_command_that_cannot_be_right_is_refused(wire: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        command_from_wire(wire)


@pytest.mark.parametrize(
    ("changed", "lever", "wanted", "found"),
    [
        ({"offload_target_blocks": 60}, Lever.SPLIT, 70, 60),
        ({"multiplier": 1.25}, Lever.MULTIPLIER, 1.5, 1.25),
        ({"transition_watermark": 41}, Lever.WATERMARK, 40, 41),
        (
            {"admission_order": "arrival"},
            Lever.ADMISSION,
            "held-prefix-first",
            "arrival",
        ),
        (
            {"max_running": 3},
            Lever.ADMISSION,
            "held-prefix-first, at most 5 running",
            "held-prefix-first, at most 3 running",
        ),
    ],
)
async def test_what_the_engine_bounded(
    node: Any, changed: dict[str, Any], lever: Lever, wanted: Any, found: Any
) -> None:
    command = EngineCommand(
        offload_target_blocks=70,
        multiplier=1.5,
        watermark=40,
        admission=AdmissionRules(AdmissionOrder.HELD_PREFIX_FIRST, 30.0, max_running=5),
    )
    result = await node.engine.apply(command)
    assert bounded_levers(command, result) == ()
    (difference,) = bounded_levers(command, result.model_copy(update=changed))
    assert (difference.lever, difference.wanted, difference.found) == (lever, wanted, found)


async def test_a_confirmation_compares_with_what_was_put_in_force(node: Any) -> None:
    command = EngineCommand(
        offload_target_blocks=70,
        multiplier=1.5,
        watermark=40,
        admission=AdmissionRules(AdmissionOrder.HELD_PREFIX_FIRST, 30.0, max_running=8),
    )
    applied = Applied(command, await node.engine.apply(command), None)
    confirmed = confirm(4, applied, await node.engine.report())
    assert confirmed is not None
    assert (confirmed.tick, confirmed.differences) == (4, ())
    node.engine.target, node.engine.multiplier = 71, 1.0
    node.engine.watermark, node.engine.order = 39, AdmissionOrder.ARRIVAL
    confirmed = confirm(4, applied, await node.engine.report())
    assert confirmed is not None
    assert [one.lever for one in confirmed.differences] == [
        Lever.SPLIT,
        Lever.MULTIPLIER,
        Lever.WATERMARK,
        Lever.ADMISSION,
    ]
    assert confirm(4, Applied(command, None, "refused"), await node.engine.report()) is None


async def test_a_reserve_that_the_engine_bounded_or_lost_is_told(node: Any) -> None:
    command = EngineCommand(reserve_target_blocks=50)
    result = (await node.engine.apply(command)).model_copy(update={"reserve_target_blocks": 40})
    (difference,) = bounded_levers(command, result)
    assert (difference.lever, difference.wanted) == (Lever.SPLIT, "50 in reserve")
    node.engine.reserve = 0
    report = await node.engine.report()
    confirmed = confirm(1, Applied(command, result, None), report)
    assert confirmed is not None
    (lost,) = confirmed.differences
    assert (lost.wanted, lost.found) == ("40 in reserve", "0 in reserve")


async def test_the_verdict_on_a_move_is_news_although_its_lever_holds_as_before(node: Any) -> None:
    await node.loop.start()
    await node.ticks(1)
    before = node.journal.ticks[-1].decision
    still = replace(
        before, levers=tuple(replace(one, reason=Reason.AT_TARGET) for one in before.levers)
    )
    assert not notable_levers(still, still)
    split, *others = still.levers
    outcome = Outcome(0.0, 10, 20, 60.0, {Figure.REACH: 64.0}, {Figure.REACH: 60.0})
    judged = replace(still, levers=(replace(split, outcome=outcome), *others))
    assert notable_levers(judged, still) == {Lever.SPLIT}
