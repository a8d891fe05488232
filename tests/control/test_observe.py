"""From report to snapshot and from commands to a command: every figure in its place."""

from __future__ import annotations

from typing import Any

import pytest

from hisparsed.control.engine_port import ServingCounters
from hisparsed.control.observe import command_for, geometry_of, observe
from hisparsed.control.outcome import bounded, confirm
from hisparsed.control.records import Applied
from hisparsed.engine.messages import AdmissionCommand, EngineCommand
from hisparsed.policy.decisions import Commands
from hisparsed.policy.reasons import Lever
from hisparsed.policy.signals import Admission, AdmissionOrder

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
