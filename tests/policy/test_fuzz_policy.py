"""Structure-aware damage to policies: the answer is a valid policy, or the line of the error."""

from __future__ import annotations

import random
import re

import pytest

from hisparsed.policy.effective import CheckedPolicy, parse_policy
from hisparsed.policy.keys import policy_keys
from hisparsed.policy.problems import ConfigError
from hisparsed.policy.schedules import Pressure
from tests.examples import examples

pytestmark = pytest.mark.examples
MUTATIONS = examples(300, 2_000)
BASE = """\
version: 1
mode: act
tick: 1s
stale_after: 5s
levers:
  split: {mode: act}
pools:
  hisparse:
    floor: 50%
  offload:
    floor: 1%
    ceiling: 50%
rebalance:
  strategy: equal-reach
  window: 60s
  dead_band:
    absolute: 0.25%
  cool_down: 60s
hot:
  min: 1.0
  max: 4.0
  pcie_budget: 20GiB
watermark:
  value: null
admission:
  order: auto
  engage_at: 70%
  max_running: null
schedules:
  - name: night
    when:
      days: [mon, fri]
      from: "22:00"
      to: "06:00"
      timezone: Europe/Berlin
    set:
      hot.step: 1
      rebalance.cool_down: 10s
  - name: busy
    when: {pressure: high}
    set:
      admission.max_waiting_sessions: 8
"""

# No key of the policy can be made from these, whatever its type, so the line is known.
NEVER = (
    '"}{"', "!x 1", "[1, 2", "{a: 1", "- 1", "&a *a", "[[1]]", "'open", "*nowhere", "\x07",
    "{b: {c: d}}", "9z9", "-5", ".inf", ".nan", "1e999", "9" * 50, "!!set {a}",
)  # fmt: skip
PERHAPS = (
    "0", "1", "2", "50", "0%", "1%", "50%", "100%", "101%", "1s", "0s", "90d", "1ms", "1GiB",
    "8192TiB", "null", "~", "true", "off", "act", "advise", "fixed", "marginal-value", "auto",
    "4096", "1.5", "0.5", "wait", "refuse", "arrival", '"06:00"', "[mon]", "",
)  # fmt: skip


def setting_lines(lines: list[str]) -> list[int]:
    """Lines that give one key a plain value."""
    return [at for at, line in enumerate(lines) if re.match(r"\s*[\w.]+: +[^{\[#\s]", line)]


def with_value(line: str, value: str) -> str:
    return f"{line.partition(':')[0]}: {value}"


def check_parts(checked: CheckedPolicy) -> None:
    """A policy that is accepted holds at any time: no clock makes it a half or a bad one."""
    assert checked.variants
    for active, policy in checked.variants.items():
        again = type(policy).model_validate(policy.model_dump(exclude={"schedules"}))
        assert again == policy.model_copy(update={"schedules": ()}), active
    for hour in range(0, 7 * 24, 11):
        for pressure in Pressure:
            assert checked.effective(1_780_000_000 + hour * 3600, pressure).policy in (
                checked.variants.values()
            )


def test_a_value_that_no_key_takes_is_refused_at_its_line() -> None:
    rng = random.Random(20260501)
    lines = BASE.splitlines()
    settings = [at for at in setting_lines(lines) if "name:" not in lines[at]]
    for _ in range(MUTATIONS // 2):
        at, value = rng.choice(settings), rng.choice(NEVER)
        damaged = [*lines]
        damaged[at] = with_value(lines[at], value)
        with pytest.raises(ConfigError) as caught:
            parse_policy("\n".join(damaged) + "\n", "p.yaml")
        found = [problem.line for problem in caught.value.problems]
        unclosed = value in ("[1, 2", "{a: 1", "'open")
        # What is left open is only noticed at what follows it.
        assert any(line == at + 1 or (unclosed and line > at) for line in found), (
            damaged[at],
            str(caught.value),
        )


def test_a_key_that_is_misspelt_is_refused_at_its_line() -> None:
    rng = random.Random(20260502)
    lines = BASE.splitlines()
    known = {part for key in policy_keys().values() for part in key.path}
    known |= {"name", "when", "set", "days", "from", "to", "timezone", "pressure", "schedules"}
    for _ in range(MUTATIONS // 4):
        at = rng.choice(setting_lines(lines))
        key, _, rest = lines[at].partition(":")
        name = key.strip()
        place = rng.randrange(len(name))
        wrong = name[:place] + rng.choice("xyzq_") + name[place + rng.randint(0, 1) :]
        if wrong in known or wrong in policy_keys():
            continue
        damaged = [*lines]
        damaged[at] = f"{key[: len(key) - len(name)]}{wrong}:{rest}"
        with pytest.raises(ConfigError) as caught:
            parse_policy("\n".join(damaged) + "\n", "p.yaml")
        assert at + 1 in [problem.line for problem in caught.value.problems], damaged[at]


def test_a_key_that_is_there_twice_is_refused_at_the_second() -> None:
    lines = BASE.splitlines()
    for at in setting_lines(lines):
        if lines[at].lstrip().startswith("- "):
            continue
        damaged = [*lines[: at + 1], lines[at], *lines[at + 1 :]]
        with pytest.raises(ConfigError) as caught:
            parse_policy("\n".join(damaged) + "\n", "p.yaml")
        assert [problem.line for problem in caught.value.problems] == [at + 2]


def test_values_that_may_do_end_in_a_valid_policy_or_at_a_line_that_was_changed() -> None:
    rng = random.Random(20260503)
    lines = BASE.splitlines()
    settings = setting_lines(lines)
    accepted = refused = 0
    for _ in range(MUTATIONS // 2):
        damaged, changed = [*lines], set()
        for _ in range(rng.randint(1, 3)):
            at = rng.choice(settings)
            damaged[at] = with_value(lines[at], rng.choice(PERHAPS))
            changed.add(at + 1)
        try:
            checked = parse_policy("\n".join(damaged) + "\n", "p.yaml")
        except ConfigError as error:
            refused += 1
            assert error.render()
            for problem in error.problems:
                # A check between two keys may point at the other one, but names the changed one.
                near = {lines[at - 1].split(":")[0].strip() for at in changed}
                named = any(name.rpartition(".")[2] in problem.words for name in near)
                assert problem.line in changed or named, (changed, str(problem))
        else:
            accepted += 1
            check_parts(checked)
    assert accepted > MUTATIONS / 40
    assert refused > MUTATIONS / 40


def test_lines_that_are_lost_moved_or_torn_never_crash() -> None:
    rng = random.Random(20260504)
    lines = BASE.splitlines()
    for _ in range(MUTATIONS // 2):
        damaged = [*lines]
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(damaged))
            match rng.randrange(6):
                case 0:
                    del damaged[at]
                case 1:
                    damaged.insert(rng.randrange(len(damaged)), damaged[at])
                case 2:
                    damaged[at] = rng.choice(("  ", "- ", "\t", " ")) + damaged[at]
                case 3:
                    damaged[at] = damaged[at].lstrip()
                case 4:
                    damaged[at] = damaged[at][: rng.randrange(len(damaged[at]) + 1)]
                case _:
                    damaged = damaged[: at + 1]
        text = "\n".join(damaged)
        try:
            checked = parse_policy(text, "p.yaml")
        except ConfigError as error:
            assert error.problems
            assert all(0 <= one.line <= text.count("\n") + 2 for one in error.problems)
            assert "p.yaml" in str(error)
        else:
            check_parts(checked)
