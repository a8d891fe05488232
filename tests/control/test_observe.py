"""From report to snapshot and from commands to a command: every figure in its place."""

from __future__ import annotations

from typing import Any

import pytest

from hisparsed.control.journal.records import Applied
from hisparsed.control.observe import bounded, command_for, confirm, geometry_of, observe
from hisparsed.engine.messages import (
    AdmissionCommand,
    EngineCommand,
    GhostReport,
    LeasePointReport,
    RequestHotReport,
)
from hisparsed.engine.port import ServingCounters
from hisparsed.policy.decisions import Commands
from hisparsed.policy.signals import (
    Admission,
    AdmissionOrder,
    GhostPoint,
    LeasePoint,
    Lever,
    Progress,
    RequestHot,
    Reserve,
)

ADMISSION = Admission(AdmissionOrder.ARRIVAL, 12.0, 5, 2, 7.0)


async def test_the_snapshot_of_a_report(node: Any) -> None:
    engine = node.engine
    engine.target, engine.in_use, engine.cached = 100, 300, 250
    engine.order = "held-prefix-first"
    snapshot = observe(
        await engine.report(),
        ServingCounters(
            prompt_tokens=11, generated_tokens=12, prefix_query_tokens=13, prefix_hit_tokens=14
        ),
        at_s=5.0,
        report_age_s=0.5,
        tick=3,
        policy_generation=2,
        last_admission=ADMISSION,
        frozen_levers=frozenset({Lever.SPLIT}),
    )
    hisparse, offload = snapshot.hisparse, snapshot.offload
    assert (hisparse.capacity_blocks, hisparse.target_blocks) == (900, 900)
    assert (hisparse.in_use_blocks, hisparse.cached_blocks, hisparse.free_blocks) == (300, 250, 350)
    assert (offload.capacity_chunks, offload.lent_blocks, offload.target_blocks) == (2000, 100, 100)
    assert (offload.in_use_chunks, offload.stored_chunks) == (10, 40)
    assert (snapshot.hot.references_total, snapshot.hot.resident_total) == (1_000, 400)
    assert (snapshot.hot.hits_total, snapshot.hot.loads_total) == (540, 60)
    assert (snapshot.prefix.hit_tokens_total, snapshot.prefix.query_tokens_total) == (14, 13)
    assert (snapshot.tokens.prompt_total, snapshot.tokens.generated_total) == (11, 12)
    assert snapshot.admission == Admission(AdmissionOrder.HELD_PREFIX_FIRST, 12.0, 8, 2, 7.0)
    assert snapshot.geometry.hot_block_rows == 16
    assert snapshot.frozen_levers == {Lever.SPLIT}
    assert (snapshot.tick, snapshot.policy_generation, snapshot.report_age_s) == (3, 2, 0.5)


async def test_an_impossible_geometry_names_the_field(node: Any) -> None:
    report = await node.engine.report()
    with pytest.raises(ValueError, match=r"geometry\.topk is 0"):
        geometry_of(report.geometry.model_copy(update={"topk": 0}))


def test_nothing_to_change_is_no_command() -> None:
    assert command_for(Commands()) is None


def test_commands_carry_over() -> None:
    command = command_for(
        Commands(
            offload_target_blocks=7,
            hisparse_target_blocks=993,
            multiplier=1.5,
            watermark="default",
            admission=ADMISSION,
        )
    )
    assert command == EngineCommand(
        offload_target_blocks=7,
        multiplier=1.5,
        transition_watermark="default",
        admission=AdmissionCommand(order="arrival", ageing_s=12.0, max_running=5),
    )


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
        transition_watermark=40,
        admission=AdmissionCommand(order="held-prefix-first", max_running=5),
    )
    result = await node.engine.apply(command)
    assert bounded(command, result) == ()
    (difference,) = bounded(command, result.model_copy(update=changed))
    assert (difference.lever, difference.wanted, difference.found) == (lever, wanted, found)


async def test_a_confirmation_compares_with_what_was_put_in_force(node: Any) -> None:
    command = EngineCommand(
        offload_target_blocks=70,
        multiplier=1.5,
        transition_watermark=40,
        admission=AdmissionCommand(order="held-prefix-first"),
    )
    applied = Applied(command, await node.engine.apply(command), None)
    confirmed = confirm(4, applied, await node.engine.report())
    assert confirmed is not None
    assert (confirmed.tick, confirmed.differences) == (4, ())
    node.engine.target, node.engine.multiplier = 71, 1.0
    node.engine.watermark, node.engine.order = 39, "arrival"
    confirmed = confirm(4, applied, await node.engine.report())
    assert confirmed is not None
    assert [one.lever for one in confirmed.differences] == [
        Lever.SPLIT,
        Lever.MULTIPLIER,
        Lever.WATERMARK,
        Lever.ADMISSION,
    ]
    assert confirm(4, Applied(command, None, "refused"), await node.engine.report()) is None


async def test_what_only_some_nodes_report_reaches_the_snapshot(node: Any) -> None:
    report = await node.engine.report()
    ghost = [GhostReport(extra_blocks=10, tokens=640)]
    leased = RequestHotReport(
        request_id="r1",
        lease_blocks=4,
        target_blocks=6,
        curve=[LeasePointReport(blocks=4, misses_per_step=9.5)],
    )
    rich = report.model_copy(
        update={
            "gpu_head_need_blocks": 77,
            "geometry": report.geometry.model_copy(
                update={"min_lease_rows": 64, "max_step_tokens": 512}
            ),
            "host": report.host.model_copy(
                update={
                    "hisparse_ghost": ghost,
                    "offload_ghost": ghost,
                    "offload_target_blocks": 100,
                    "reserve_target_blocks": 50,
                    "reserve_blocks": 20,
                    "release": "possible",
                    "release_wanted": True,
                }
            ),
            "requests": report.requests.model_copy(update={"held_back": 2, "oldest_wait_s": 8.5}),
            "hot": report.hot.model_copy(
                update={"counted": False, "requests": [leased], "individual_leases": 1}
            ),
        }
    )
    snapshot = snapshot_of(rich, ServingCounters(refused=3))
    assert (snapshot.geometry.least_lease_rows, snapshot.geometry.max_step_tokens) == (64, 512)
    assert snapshot.hisparse.ghost == snapshot.offload.ghost == (GhostPoint(10, 640),)
    assert snapshot.hisparse.target_blocks == 1_000 - 100 - 50
    assert snapshot.reserve == Reserve(50, 20, can_release=True, releasing=True)
    assert snapshot.gpu.head_need_blocks == 77
    counts = snapshot.requests
    assert (counts.held_back, counts.refused_total, counts.oldest_wait_s) == (2, 3, 8.5)
    assert (snapshot.hot.counted, snapshot.hot.individual_leases) == (False, 1)
    assert snapshot.requests_hot == (RequestHot("r1", 4, 6, (LeasePoint(4, 9.5),)),)
    assert snapshot.progress == Progress(report.steps, report.scheduled_tokens)


async def test_what_a_node_does_not_report_is_unknown(node: Any) -> None:
    report = await node.engine.report()
    host = report.host.model_copy(update={"hisparse_ghost": [], "offload_ghost": []})
    poor = report.model_copy(update={"host": host, "gpu_head_need_blocks": None})
    snapshot = snapshot_of(poor, ServingCounters())
    assert snapshot.requests.refused_total is None
    assert snapshot.gpu.head_need_blocks is None
    assert snapshot.geometry.max_step_tokens is None
    assert (snapshot.hisparse.ghost, snapshot.requests_hot) == ((), ())


def snapshot_of(report: Any, serving: ServingCounters) -> Any:
    return observe(
        report,
        serving,
        at_s=1.0,
        report_age_s=0.0,
        tick=1,
        policy_generation=1,
        last_admission=ADMISSION,
    )


def test_reserve_and_leases_carry_over() -> None:
    command = command_for(
        Commands(reserve_target_blocks=9, release_reserve=False, hot_leases={"r1": 4})
    )
    assert command == EngineCommand(
        reserve_target_blocks=9, release_reserve=False, hot_leases={"r1": 4}
    )


async def test_a_reserve_that_the_engine_bounded_or_lost_is_told(node: Any) -> None:
    command = EngineCommand(reserve_target_blocks=50)
    result = (await node.engine.apply(command)).model_copy(update={"reserve_target_blocks": 40})
    (difference,) = bounded(command, result)
    assert (difference.lever, difference.wanted) == (Lever.SPLIT, "50 in reserve")
    node.engine.reserve = 0
    report = await node.engine.report()
    confirmed = confirm(1, Applied(command, result, None), report)
    assert confirmed is not None
    (lost,) = confirmed.differences
    assert (lost.wanted, lost.found) == ("40 in reserve", "0 in reserve")
