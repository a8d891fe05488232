"""The policy in force: swapped whole, or the last good one with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from hisparsed.control.actions import StaleGenerationError
from hisparsed.control.policy_source import ReloadOutcome
from hisparsed.policy.document import ConfigError
from hisparsed.policy.reasons import Lever
from hisparsed.policy.schema import Mode


def test_a_good_policy_replaces_the_old_one(node: Any) -> None:
    before = node.source.active
    node.policy_path.write_text("version: 1\ntick: 2s\n")
    reload = node.source.reload()
    assert reload.outcome is ReloadOutcome.LOADED
    assert reload.active.value.tick == 2.0
    assert (before.generation, reload.active.generation) == (1, 2)
    assert before.content_hash != reload.active.content_hash


def test_the_same_document_changes_nothing(node: Any) -> None:
    reload = node.source.reload()
    assert reload.outcome is ReloadOutcome.UNCHANGED
    assert node.source.active.generation == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("version: 1\ntick: 2 bananas\n", "policy.yaml:2: tick"),
        ("version: 1\nhott: {}\n", "hott"),
        ("version: [1\n", "policy.yaml"),
    ],
)
def test_a_bad_policy_keeps_the_last_good_one(node: Any, text: str, expected: str) -> None:
    good = node.source.active
    node.policy_path.write_text(text)
    reload = node.source.reload()
    assert reload.outcome is ReloadOutcome.REJECTED
    assert expected in reload.error
    assert node.source.active is good
    assert node.source.reload_failures == 1
    assert node.source.last_error == reload.error


def test_a_missing_document_keeps_the_last_good_one(node: Any) -> None:
    node.policy_path.unlink()
    reload = node.source.reload()
    assert reload.outcome is ReloadOutcome.REJECTED
    assert "no such file" in reload.error


async def test_a_policy_impossible_on_this_node_is_rejected(node: Any) -> None:
    await node.loop.start()
    node.policy_path.write_text("version: 1\nhot: {min: 8, max: 9, start: 8}\n")
    reload = node.source.reload()
    assert reload.outcome is ReloadOutcome.REJECTED
    assert "hot.min" in reload.error
    assert str(node.policy_path) in reload.error


def test_mending_the_document_clears_the_error(node: Any) -> None:
    good = node.policy_path.read_text()
    node.policy_path.write_text("version: 2\n")
    node.source.reload()
    node.policy_path.write_text(good)
    assert node.source.reload().outcome is ReloadOutcome.UNCHANGED
    assert node.source.last_error is None
    assert node.source.reload_failures == 1


def test_a_bad_first_policy_is_an_error(make_node: Any) -> None:
    with pytest.raises(ConfigError, match="version"):
        make_node("mode: act\n")


def test_a_mode_can_only_be_made_more_cautious(make_node: Any) -> None:
    node = make_node("version: 1\nlevers: {split: {mode: advise}}\n")
    policy, overrides = node.source.active.value, node.overrides
    overrides.set_mode(policy, [Lever.MULTIPLIER], Mode.OFF)
    assert overrides.over(policy).mode_of(Lever.MULTIPLIER) is Mode.OFF
    assert overrides.over(policy).mode_of(Lever.SPLIT) is Mode.ADVISE
    assert overrides.over(policy).mode_of(Lever.ADMISSION) is Mode.ACT
    with pytest.raises(ValueError, match="says advise for split"):
        overrides.set_mode(policy, [Lever.ADMISSION, Lever.SPLIT], Mode.ACT)
    assert Lever.ADMISSION not in overrides.modes
    overrides.set_mode(policy, list(Lever), None)
    assert overrides.over(policy) is policy


def test_a_reload_to_off_outranks_a_mode_set_before(node: Any) -> None:
    overrides = node.overrides
    overrides.set_mode(node.source.active.value, list(Lever), Mode.ADVISE)
    node.policy_path.write_text("version: 1\nmode: off\n")
    policy = node.source.reload().active.value
    assert {overrides.over(policy).mode_of(lever) for lever in Lever} == {Mode.OFF}


def test_freezing_adds_up_and_survives_a_reload(node: Any) -> None:
    node.operator.freeze([Lever.SPLIT], actor="ann")
    node.operator.freeze([Lever.ADMISSION], actor="ben")
    node.policy_path.write_text("version: 1\n")
    node.operator.reload(actor="ann")
    assert node.overrides.frozen == {Lever.SPLIT, Lever.ADMISSION}
    node.operator.thaw([Lever.SPLIT], actor="ann")
    assert node.overrides.frozen == {Lever.ADMISSION}


def test_an_action_for_an_older_policy_is_refused_whole(node: Any) -> None:
    node.policy_path.write_text("version: 1\n")
    node.operator.reload(actor="ann", expected_generation=1)
    with pytest.raises(StaleGenerationError, match="generation 2, not 1"):
        node.operator.freeze([Lever.SPLIT], actor="ben", expected_generation=1)
    assert node.overrides.frozen == frozenset()
