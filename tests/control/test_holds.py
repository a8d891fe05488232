"""Freezes and modes above the policy: only more cautious, and through every reload."""

from __future__ import annotations

from typing import Any

import pytest

from hisparsed.policy.schema import Mode
from hisparsed.policy.signals import Lever


def test_a_mode_can_only_be_made_more_cautious(make_node: Any) -> None:
    node = make_node("version: 1\nlevers: {split: {mode: advise}}\n")
    policy, holds = node.source.active.value, node.holds
    holds.set_mode(policy, [Lever.MULTIPLIER], Mode.OFF)
    assert holds.over(policy).mode_of(Lever.MULTIPLIER) is Mode.OFF
    assert holds.over(policy).mode_of(Lever.SPLIT) is Mode.ADVISE
    assert holds.over(policy).mode_of(Lever.ADMISSION) is Mode.ACT
    with pytest.raises(ValueError, match="says advise for split"):
        holds.set_mode(policy, [Lever.ADMISSION, Lever.SPLIT], Mode.ACT)
    assert Lever.ADMISSION not in holds.modes
    holds.set_mode(policy, list(Lever), None)
    assert holds.over(policy) is policy


def test_a_reload_to_off_outranks_a_mode_set_before(node: Any) -> None:
    holds = node.holds
    holds.set_mode(node.source.active.value, list(Lever), Mode.ADVISE)
    node.policy_path.write_text("version: 1\nmode: off\n")
    policy = node.source.reload().active.value
    assert {holds.over(policy).mode_of(lever) for lever in Lever} == {Mode.OFF}


def test_freezing_adds_up_and_survives_a_reload(node: Any) -> None:
    node.operator.freeze([Lever.SPLIT], actor="ann")
    node.operator.freeze([Lever.ADMISSION], actor="ben")
    node.policy_path.write_text("version: 1\n")
    node.operator.reload(actor="ann")
    assert node.holds.frozen == {Lever.SPLIT, Lever.ADMISSION}
    node.operator.thaw([Lever.SPLIT], actor="ann")
    assert node.holds.frozen == {Lever.ADMISSION}
