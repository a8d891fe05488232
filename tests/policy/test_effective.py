"""Document, schedules and overrides become one policy that is valid at every moment."""

from __future__ import annotations

from typing import Any

import pytest

from hisparsed.policy.bounds import problems
from hisparsed.policy.effective import Origin, check_policy, parse_policy, pressure_now
from hisparsed.policy.keys import changes, policy_keys, settable_keys
from hisparsed.policy.problems import ConfigError
from hisparsed.policy.schedules import Override, Pressure
from hisparsed.policy.schema import Policy

DOCUMENT = """\
version: 1
tick: 2s
hot: {max: 5}
schedules:
  - name: busy
    when: {pressure: high}
    set: {hot.max: 3, hot.start: 2.5}
  - name: always
    when: {days: [mon, tue, wed, thu, fri, sat, sun]}
    set:
      hot.max: 6
      pools.offload.ceiling: 40%
"""
NOW = 1_780_000_000.0


def override(key: str, value: Any, expires: float | None = None) -> Override:
    return Override(key, value, "ann", NOW, expires)


def rejected(text: str, *overrides: Override) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_policy(parse_policy(text, "p.yaml").loaded, overrides)
    return str(caught.value).splitlines()


def test_the_later_entry_wins_and_an_override_wins_over_both() -> None:
    checked = parse_policy(DOCUMENT, "p.yaml")
    calm = checked.effective(NOW, Pressure.LOW)
    assert (calm.active, calm.policy.hot.max, calm.policy.hot.start) == ((1,), 6.0, "auto")
    busy = checked.effective(NOW, Pressure.HIGH)
    assert (busy.active, busy.policy.hot.max, busy.policy.hot.start) == ((0, 1), 6.0, 2.5)
    assert busy.policy.pools.offload.ceiling == 0.4
    above = check_policy(checked.loaded, [override("hot.max", "4")])
    assert above.effective(NOW, Pressure.HIGH).policy.hot.max == 4.0
    assert checked.loaded.value.hot.max == 5.0


def test_each_value_says_where_it_comes_from() -> None:
    checked = check_policy(
        parse_policy(DOCUMENT, "p.yaml").loaded, [override("tick", "1s", NOW + 60)]
    )
    sources = checked.effective(NOW, Pressure.HIGH).sources
    assert list(sources) == list(settable_keys())
    assert sources["mode"].origin is Origin.DEFAULT
    assert (sources["tick"].origin, sources["tick"].actor) == (Origin.OVERRIDE, "ann")
    assert sources["tick"].expires_unix_s == NOW + 60
    assert (sources["hot.max"].schedule, sources["hot.max"].line) == ("always", 11)
    assert (sources["hot.start"].schedule, sources["hot.start"].line) == ("busy", 7)
    plain = checked.effective(NOW, Pressure.LOW).sources
    assert plain["hot.start"].origin is Origin.DEFAULT


def test_an_override_of_no_key_is_refused_with_the_closest_one() -> None:
    (said,) = rejected(DOCUMENT, override("hot.maks", "4"))
    assert "hot.maks" in said
    assert "hot.max" in said


def test_no_combination_of_entries_may_be_invalid() -> None:
    text = (
        "version: 1\n"
        "schedules:\n"
        "  - {name: low, when: {days: [mon]}, set: {hot.max: 3}}\n"
        "  - {name: high, when: {pressure: high}, set: {hot.start: 3.5}}\n"
    )
    (line,) = rejected(text)
    assert line.startswith("p.yaml:4: schedules[1].set.hot.start: ")
    assert 'while "low" and "high" are active: start 3.5 is outside' in line


def test_entries_that_cannot_meet_may_contradict_each_other() -> None:
    text = (
        "version: 1\n"
        "schedules:\n"
        "  - {name: low, when: {days: [mon]}, set: {hot.max: 3}}\n"
        "  - {name: high, when: {days: [tue]}, set: {hot.start: 3.5}}\n"
    )
    assert set(parse_policy(text, "p.yaml").variants) == {(), (0,), (1,)}


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("hot.mx: 3", "is not a known key; did you mean hot.max?"),
        ("split.dead_band: 3", "is not a known key; did you mean rebalance.dead_band.relative?"),
        ("zzz.qqqq: 3", "is not a known key; `hisparsed policy reference` lists all keys"),
        ("hot: 3", "is a section; set its keys, such as hot.min"),
        ("hot.max: much", '"much" is not a number'),
        ("hot.max: [3]", "is not one value"),
        ("version: 1", "can only be changed in the document"),
        ("schedules: 1", "can only be changed in the document"),
        ("pools.offload.floor: 60%", "ceiling 50% is below the floor 60%"),
        ("tick: null", "null is not a time"),
    ],
)
def test_a_bad_value_names_the_line_of_the_entry(setting: str, says: str) -> None:
    text = (
        "version: 1\n"
        "schedules:\n"
        "  - name: one\n"
        "    when: {pressure: high}\n"
        "    set:\n"
        "      admission.ageing: 20s\n"
        f"      {setting}\n"
    )
    with pytest.raises(ConfigError) as caught:
        parse_policy(text, "p.yaml")
    (problem,) = caught.value.problems
    assert says in problem.words
    # A check between two keys points at one of them or at the entry.
    assert problem.line in ((3, 7) if "floor" in setting else (7,))


def test_two_entries_of_one_name_are_refused() -> None:
    entry = "  - {name: one, when: {pressure: high}, set: {tick: 2s}}\n"
    with pytest.raises(ConfigError, match=r'p.yaml:4: .*"one" names an earlier entry already'):
        parse_policy(f"version: 1\nschedules:\n{entry}{entry}", "p.yaml")


def test_more_entries_than_can_be_checked_are_refused() -> None:
    entries = "".join(
        f"  - {{name: e{index}, when: {{pressure: high}}, set: {{tick: 2s}}}}\n"
        for index in range(9)
    )
    with pytest.raises(ConfigError, match="at most 8"):
        parse_policy(f"version: 1\nschedules:\n{entries}", "p.yaml")


def test_an_override_must_be_valid_under_every_schedule() -> None:
    document = DOCUMENT.replace("hot.max: 3, hot.start: 2.5", "tick: 1s")
    (line,) = rejected(document.replace("hot.max: 6", "hot.max: 4"), override("hot.start", 4.5))
    assert 'hot.start: while "always" is active: start 4.5' in line


def test_a_bad_override_names_its_key() -> None:
    assert rejected(DOCUMENT, override("tick", "soon"))[0].startswith('p.yaml: tick: "soon" is not')
    assert "is not a known key" in rejected(DOCUMENT, override("tock", 1))[0]


def test_a_node_that_cannot_run_a_combination_refuses_it(kit: Any) -> None:
    text = (
        "version: 1\n"
        "schedules:\n"
        "  - name: late\n"
        "    when: {days: [mon]}\n"
        "    set: {hot.min: 6, hot.max: 7, hot.start: 6}\n"
    )
    loaded = parse_policy(text, "p.yaml").loaded
    with pytest.raises(ConfigError) as caught:
        check_policy(loaded, (), lambda policy: problems(policy, kit.geometry))
    (problem,) = caught.value.problems
    assert problem.line == 5
    assert 'while "late" is active: hot.min is 6.0, but this node can lease' in problem.message


def test_values_read_back_as_what_they_were() -> None:
    """Whatever is shown can be pasted into a document."""
    odd = Policy.model_validate(
        {
            "version": 1,
            "tick": 1.2345678,
            "stale_after": "1h30m",
            "hot": {"pcie_budget": 123_456_789, "free_low": 0.123456, "step": 1 / 3},
            "pools": {"offload": {"floor": "1.5GiB", "ceiling": "7000000001B", "start": "2GiB"}},
            "admission": {"max_running": 123_456},
        }
    )
    nested: dict[str, Any] = {"version": 1}
    text = "version: 1\n"
    for key in settable_keys().values():
        section = nested
        for part in key.path[:-1]:
            section = section.setdefault(part, {})
        section[key.path[-1]] = key.text(odd)
    lines = [f"{name}: {key.text(odd)}" for name, key in settable_keys().items()]
    text += "schedules:\n- name: all\n  when: {pressure: low}\n  set:\n"
    text += "".join(f"    {line}\n" for line in lines)
    assert parse_policy(text, "p.yaml").variants[(0,)].model_copy(update={"schedules": ()}) == odd


def test_changes_are_told_key_by_key() -> None:
    before = Policy.model_validate({"version": 1, "tick": "2s"})
    after = parse_policy(DOCUMENT.replace("tick: 2s", "tick: 1s"), "p.yaml").loaded.value
    found = {change.key: (change.active, change.new) for change in changes(before, after)}
    assert found.pop("schedules.busy")[0] is None
    assert found.pop("schedules.always")[0] is None
    assert found == {"tick": ("2s", "1s"), "hot.max": ("auto", "5")}
    assert changes(after, after) == []


def test_another_order_of_schedules_is_a_change() -> None:
    first = parse_policy(DOCUMENT, "p.yaml").loaded.value
    turned = first.model_copy(update={"schedules": first.schedules[::-1]})
    (change,) = changes(first, turned)
    assert (change.key, change.active, change.new) == ("schedules", "busy, always", "always, busy")


def test_pressure_has_hysteresis(kit: Any) -> None:
    thresholds = {"engage_at": "70%", "release_at": "55%"}
    policy = Policy.model_validate({"version": 1, "admission": thresholds})
    snapshot = kit.idle_snapshot()

    def loaded(share: float) -> Any:
        from hisparsed.policy.reach import reach_now

        tokens = round(share * reach_now(snapshot).min_tokens)
        return kit.change(snapshot, sessions__live_set_tokens=tokens, sessions__live_sessions=1)

    low, high = Pressure.LOW, Pressure.HIGH
    assert pressure_now(policy, loaded(0.71), low) is high
    assert pressure_now(policy, loaded(0.60), high) is high
    assert pressure_now(policy, loaded(0.60), low) is low
    assert pressure_now(policy, loaded(0.54), high) is low


def test_every_leaf_of_the_schema_is_a_key() -> None:
    dumped = Policy.model_validate({"version": 1}).model_dump()

    def leaves(value: Any, prefix: str = "") -> list[str]:
        if not isinstance(value, dict):
            return [prefix[1:]]
        return [key for name, item in value.items() for key in leaves(item, f"{prefix}.{name}")]

    assert list(policy_keys()) == leaves(dumped)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("version: 2\n", "p.yaml:1: version: 2 is not 1; write 1"),
        (
            "version: 1\nschedules:\n- name: x y\n  when: {days: [mon]}\n  set: {hot.max: 3}\n",
            'p.yaml:3: schedules[0].name: "x y" has characters that may not be there; it must ',
        ),
    ],
)
def test_a_value_of_the_wrong_form_is_told_the_right_one(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_policy(text, "p.yaml")
    assert str(caught.value).startswith(says)
