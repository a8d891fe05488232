"""Targets over a restart: kept whole, used only for the same policy on the same node."""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hisparsed.control.state_files import TARGETS_FILE_NAME, TargetFile, Targets, with_kept_targets
from hisparsed.policy.bounds import start_command
from hisparsed.policy.signals import AdmissionOrder


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "kept"
    folder.mkdir()
    return folder


async def parts(node: Any) -> tuple[Any, Any, Targets]:
    """Geometry, policy, and targets that differ from the policy's start."""
    geometry = (await node.engine.report()).geometry
    policy = node.source.active.value
    admission = start_command(policy, geometry).admission
    assert admission is not None
    held = replace(admission, order=AdmissionOrder.HELD_PREFIX_FIRST, ageing_s=77.0)
    return geometry, policy, Targets(250, 3.0, held)


async def test_what_was_saved_comes_back(node: Any, state: Path) -> None:
    geometry, _, targets = await parts(node)
    TargetFile(state).save("hash", geometry, targets)
    assert TargetFile(state).load("hash", geometry) == targets
    assert stat.S_IMODE((state / TARGETS_FILE_NAME).stat().st_mode) == 0o640
    assert not (state / f"{TARGETS_FILE_NAME}.new").exists()


async def test_another_policy_or_another_node_counts_as_nothing(node: Any, state: Path) -> None:
    geometry, _, targets = await parts(node)
    file = TargetFile(state)
    assert file.load("hash", geometry) is None, "nothing was saved yet"
    file.save("hash", geometry, targets)
    assert file.load("other", geometry) is None
    assert file.load("hash", replace(geometry, budget_blocks=999)) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: json.dumps(json.loads(text) | {"version": 2}),
        lambda text: json.dumps(json.loads(text) | {"stranger": 1}),
        lambda text: text.replace('"offload_target_blocks": 250', '"offload_target_blocks": -1'),
        lambda text: text.replace("held-prefix-first", "random"),
    ],
)
async def test_a_torn_or_foreign_file_is_ignored_with_a_warning(
    node: Any, state: Path, damage: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    geometry, _, targets = await parts(node)
    TargetFile(state).save("hash", geometry, targets)
    path = state / TARGETS_FILE_NAME
    path.write_text(damage(path.read_text()))
    with caplog.at_level(logging.WARNING):
        assert TargetFile(state).load("hash", geometry) is None
    (said,) = caplog.messages
    assert TARGETS_FILE_NAME in said
    assert said.endswith("it is ignored.")


async def test_a_disk_that_refuses_is_told_once_and_stops_nothing(
    node: Any, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    geometry, _, targets = await parts(node)
    file = TargetFile(state / "missing")
    for blocks in (1, 2, 3):
        file.save("hash", geometry, replace(targets, offload_target_blocks=blocks))
    assert [message.count("cannot be written") for message in caplog.messages] == [1]


async def test_the_same_targets_are_not_written_again(node: Any, state: Path) -> None:
    geometry, _, targets = await parts(node)
    file = TargetFile(state)
    file.save("hash", geometry, targets)
    (state / TARGETS_FILE_NAME).unlink()
    file.save("hash", geometry, targets)
    assert not (state / TARGETS_FILE_NAME).exists()
    file.save("hash", geometry, replace(targets, multiplier=2.0))
    assert (state / TARGETS_FILE_NAME).exists()


async def test_the_policys_bounds_apply_to_what_is_restored(node: Any) -> None:
    geometry, policy, targets = await parts(node)
    start = start_command(policy, geometry)
    wild = replace(targets, offload_target_blocks=10_000, multiplier=1_000.0)
    commands = with_kept_targets(start, wild, policy, geometry)
    assert commands.offload_target_blocks is not None
    assert commands.hisparse_target_blocks is not None
    assert commands.offload_target_blocks + commands.hisparse_target_blocks == 1_000
    assert commands.hisparse_target_blocks >= 66, "one request at max_model_len"
    assert commands.multiplier == 4.0, "twice what vLLM reserves without drafts"


async def test_levers_that_the_policy_may_not_act_on_are_not_restored(
    make_node: Callable[[str], Any],
) -> None:
    node = make_node("version: 1\nmode: act\n")
    _, _, targets = await parts(node)
    off = make_node("version: 1\nmode: off\n")
    geometry = (await off.engine.report()).geometry
    policy = off.source.active.value
    start = start_command(policy, geometry)
    assert with_kept_targets(start, targets, policy, geometry) == start


async def test_a_node_that_comes_back_begins_where_it_was(
    make_node: Callable[[str], Any], policy_text: str
) -> None:
    first = make_node(policy_text)
    await first.loop.start()
    first.engine.target = 10
    await first.ticks(4)
    moved_to = first.engine.target
    assert moved_to != 100, "the policy has moved away from its start"
    second = make_node(policy_text)
    await second.loop.start()
    assert second.engine.commands[0].offload_target_blocks == moved_to
    (event,) = await second.journal.events(10)
    assert event.sentence.startswith(f"Restored from the last run: {moved_to} of 1000 host blocks")


async def test_a_changed_policy_begins_with_its_own_start(
    make_node: Callable[[str], Any], policy_text: str
) -> None:
    first = make_node(policy_text)
    await first.loop.start()
    second = make_node(policy_text.replace("10%", "30%"))
    await second.loop.start()
    assert second.engine.commands[0].offload_target_blocks == 300
