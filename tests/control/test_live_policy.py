"""The policy in force: swapped whole or kept, and values that operators set for a time."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from hisparsed.control.live_policy import PolicySource, ReloadOutcome
from hisparsed.control.operator import restore_overrides
from hisparsed.control.state_files import OverrideFile
from hisparsed.policy.bounds import problems
from hisparsed.policy.problems import ConfigError
from hisparsed.policy.schema import Mode
from hisparsed.policy.signals import Lever


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


@pytest.fixture
def kept(node: Any) -> Any:
    """A node that keeps what is set in a file."""
    node.source.restore(OverrideFile(node.folder))
    return node


def source_of(node: Any) -> PolicySource:
    """As a daemon that is started again would make it."""
    return PolicySource(node.policy_path, clock=node.clock.monotonic, wall_clock=node.clock.wall)


def set_value(node: Any, key: str, value: Any, for_s: float | None = 60.0) -> None:
    node.operator.set_value(key, value, for_s=for_s, actor="ann")


def kinds(node: Any) -> list[str]:
    return [event.kind.value for event in reversed(node.journal.recent_events(100))]


async def test_a_value_ends_by_itself_at_the_next_tick(node: Any) -> None:
    await node.loop.start()
    set_value(node, "rebalance.cool_down", "7s", for_s=2.5)
    await node.ticks(2)
    assert node.source.in_force.policy.rebalance.cool_down == 7.0
    assert node.source.active.generation == 2
    await node.ticks(2)
    assert node.source.in_force.policy.rebalance.cool_down == 2.0
    assert node.source.active.generation == 3
    assert kinds(node)[-2:] == ["value-set", "value-expired"]
    (event, *_) = node.journal.recent_events(1)
    assert "rebalance.cool_down = 7s, set by ann, has ended" in event.sentence


async def test_the_tick_decides_with_what_was_set(node: Any) -> None:
    await node.loop.start()
    set_value(node, "levers.split.mode", "off")
    await node.ticks(1)
    split = node.journal.ticks[-1].decision.of(Lever.SPLIT)
    assert split.reason.value == "Off"
    assert node.journal.ticks[-1].snapshot.policy_generation == 2


def test_setting_may_loosen_what_the_document_says(make_node: Any) -> None:
    node = make_node("version: 1\nmode: off\n")
    set_value(node, "mode", "act")
    assert node.source.in_force.policy.mode is Mode.ACT
    assert node.holds.over(node.source.in_force.policy).mode_of(Lever.SPLIT) is Mode.ACT


def test_setting_again_replaces(node: Any) -> None:
    set_value(node, "hot.max", 3)
    set_value(node, "hot.max", 2.5, for_s=None)
    (override,) = node.source.overrides
    assert (override.value, override.expires_unix_s) == (2.5, None)


def test_values_survive_a_reload(node: Any) -> None:
    set_value(node, "hot.max", 3)
    node.policy_path.write_text("version: 1\nhot: {max: 6}\n")
    node.operator.reload(actor="ben")
    assert node.source.in_force.policy.hot.max == 3.0
    assert node.source.active.value.hot.max == 6.0


def test_a_reload_drops_what_is_no_longer_valid_and_says_so(node: Any) -> None:
    set_value(node, "hot.start", 3.5)
    set_value(node, "hot.step", 1)
    node.policy_path.write_text("version: 1\nhot: {max: 3}\n")
    node.operator.reload(actor="ben")
    assert [one.key for one in node.source.overrides] == ["hot.step"]
    assert node.source.in_force.policy.hot.start == "auto"
    (event, *_) = node.journal.recent_events(1)
    assert event.kind.value == "value-dropped"
    assert "hot.start = 3.5, set by ann" in event.sentence
    assert "start 3.5 is outside min 1.0 to max 3.0" in event.sentence


def test_a_rejected_reload_leaves_values_alone(node: Any) -> None:
    set_value(node, "hot.start", 3.5)
    before = node.source.in_force
    node.policy_path.write_text("version: 1\nhot: {max: much}\n")
    node.operator.reload(actor="ben")
    assert node.source.in_force is before


async def test_a_value_that_leant_on_an_expired_one_goes_with_it(node: Any) -> None:
    await node.loop.start()
    set_value(node, "hot.max", 4.0, for_s=None)
    set_value(node, "rebalance.cool_down", "9s", for_s=1)
    set_value(node, "rebalance.cool_down_towards_safety", "8s", for_s=100)
    await node.ticks(3)
    assert [one.key for one in node.source.overrides] == ["hot.max"]
    assert kinds(node)[-2:] == ["value-expired", "value-dropped"]


async def test_a_value_impossible_on_this_node_is_refused(node: Any) -> None:
    await node.loop.start()
    set_value(node, "hot.max", 9)
    set_value(node, "hot.start", 9)
    with pytest.raises(ConfigError, match=r"hot\.min is 8\.0, but this node can lease"):
        set_value(node, "hot.min", 8)
    assert [one.key for one in node.source.overrides] == ["hot.max", "hot.start"]


def test_values_survive_a_restart(kept: Any) -> None:
    set_value(kept, "hot.max", 3)
    set_value(kept, "admission.order", "arrival", for_s=None)
    again = source_of(kept)
    assert again.restore(OverrideFile(kept.folder)) == ()
    assert again.overrides == kept.source.overrides
    assert again.in_force.policy == kept.source.in_force.policy


def test_what_ended_while_the_daemon_was_down_does_not_come_back(kept: Any) -> None:
    set_value(kept, "hot.max", 3, for_s=60)
    set_value(kept, "hot.step", 1, for_s=None)
    kept.clock.now_s += 61
    again = source_of(kept)
    again.restore(OverrideFile(kept.folder))
    assert [one.key for one in again.overrides] == ["hot.step"]


def test_what_is_no_longer_valid_after_a_restart_is_dropped(kept: Any) -> None:
    set_value(kept, "hot.start", 3.5)
    kept.policy_path.write_text("version: 1\nhot: {max: 3}\n")
    again = source_of(kept)
    (dropped,) = again.restore(OverrideFile(kept.folder))
    assert dropped.override.key == "hot.start"
    assert "start 3.5 is outside" in dropped.why
    assert OverrideFile(kept.folder).load() == ()


async def test_what_the_node_cannot_do_is_dropped_at_its_start(kept: Any) -> None:
    for key, value in (("hot.max", 9), ("hot.start", 9), ("hot.min", 8)):
        set_value(kept, key, value)
    await kept.loop.start()
    assert [one.key for one in kept.source.overrides] == ["hot.max", "hot.start"]
    assert "value-dropped" in kinds(kept)
    assert not problems(kept.source.in_force.policy, kept.source._geometry)


def test_the_file_is_for_its_group_to_read(kept: Any) -> None:
    before = os.umask(0o077)
    try:
        set_value(kept, "hot.max", 3)
    finally:
        os.umask(before)
    mode = stat.S_IMODE((kept.folder / "overrides.json").stat().st_mode)
    assert mode == 0o640


def test_unset_takes_it_out_of_the_file(kept: Any) -> None:
    set_value(kept, "hot.max", 3)
    kept.operator.unset_value("hot.max", actor="ann")
    assert json.loads((kept.folder / "overrides.json").read_text())["overrides"] == []


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"version": 2, "overrides": []}', b"\xff\xfe", b'{"overrides": [{}]}']
)
def test_a_damaged_file_is_kept_aside_and_told(node: Any, content: bytes) -> None:
    (node.folder / "overrides.json").write_bytes(content)
    restore_overrides(node.source, node.recorder, node.folder)
    assert node.source.overrides == ()
    assert (node.folder / "overrides.json.damaged").read_bytes() == content
    (event, *_) = node.journal.recent_events(1)
    assert "overrides.json is damaged" in event.sentence
    set_value(node, "hot.max", 3)
    assert OverrideFile(node.folder).load() == node.source.overrides


def test_a_disk_that_takes_nothing_does_not_stop_the_operator(
    kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    set_value(kept, "hot.max", 3)
    assert kept.source.in_force.policy.hot.max == 3.0
    (event, *_) = kept.journal.recent_events(1)
    assert "will not survive a restart" in event.sentence
    assert "No space left on device" in event.sentence
    monkeypatch.undo()
    set_value(kept, "hot.max", 2)
    assert kept.source.not_kept is None


def test_a_crash_while_writing_leaves_the_old_file(
    kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_value(kept, "hot.max", 3)

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        set_value(kept, "hot.max", 2)
    monkeypatch.undo()
    (override,) = OverrideFile(kept.folder).load()
    assert override.value == 3


async def test_schedules_begin_and_end_with_events(make_node: Any) -> None:
    node = make_node(
        "version: 1\nschedules:\n"
        "  - {name: soon, when: {from: '22:15', to: '22:16', timezone: UTC}, set: {hot.max: 3}}\n"
    )
    # The clock of these tests shows 22:15:00 UTC of some day.
    await node.loop.start()
    await node.ticks(1)
    assert node.source.in_force.policy.hot.max == 3.0
    generation = node.source.active.generation
    node.clock.now_s += 60
    await node.ticks(1)
    assert node.source.in_force.policy.hot.max == "auto"
    assert node.source.active.generation == generation
    assert kinds(node)[-1] == "schedule-ended"
