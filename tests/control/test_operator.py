"""Operator actions while the loop ticks: no tick is lost, no policy is half in force."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hisparsed.control.operator import StaleGenerationError
from hisparsed.policy.problems import ConfigError
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Lever

RELOADS = 1_000
GOOD = "version: 1\nhot: {{max: {0}, start: {0}}}\nrebalance: {{cool_down: {0}m}}\n"
BAD = (
    "version: 1\nhot: {max: 9, start: much}\n",
    "version: 1\nhot: {max: 3, start: 4}\n",
    "version: [1\n",
    "",
    "version: 2\n",
    "version: 1\nhot: {min: 8, max: 9, start: 8}\n",
)


def is_complete(policy: Policy) -> bool:
    """All three values are of one document."""
    return policy.hot.max == policy.hot.start == policy.rebalance.cool_down / 60


async def test_a_thousand_reloads_while_the_loop_ticks(make_node: Any) -> None:
    """A hundred reloads a second for ten seconds of the loop's time, a third of them bad."""
    node = make_node(GOOD.format(2))
    await node.loop.start()
    rng = random.Random(9)
    loaded = rejected = 0
    for number in range(RELOADS):
        if rng.random() < 1 / 3:
            node.policy_path.write_text(rng.choice(BAD))
        else:
            node.policy_path.write_text(GOOD.format(rng.choice((1, 2, 3, 4))))
        before = node.source.in_force
        outcome = node.operator.reload(actor="storm").outcome
        loaded += outcome == "loaded"
        rejected += outcome == "rejected"
        assert is_complete(node.source.in_force.policy)
        if outcome == "rejected":
            assert node.source.in_force is before
        node.clock.now_s += 0.01
        if number % 100 == 99:
            await node.loop.tick()
    assert loaded > RELOADS / 3
    assert rejected > RELOADS / 5
    assert node.source.reload_failures == rejected
    assert [tick.decision.tick for tick in node.journal.ticks] == list(range(1, 11))
    assert node.current.counters.failed_ticks == 0
    assert node.source.active.generation == 1 + loaded


async def test_reloads_between_report_and_command_lose_no_tick(make_node: Any) -> None:
    node = make_node(GOOD.format(2))
    await node.loop.start()
    seen: list[int] = []

    def reload() -> None:
        node.policy_path.write_text(GOOD.format(1 + (node.source.active.generation + 1) % 4))
        node.operator.reload(actor="storm")
        seen.append(node.source.active.generation)

    node.engine.before_report = reload
    await node.ticks(50)
    ticks = node.journal.ticks
    assert [tick.decision.tick for tick in ticks] == list(range(1, 51))
    assert [tick.snapshot.policy_generation for tick in ticks] == seen
    assert len({tick.policy_hash for tick in ticks}) == 4


async def test_values_set_and_unset_at_random_always_leave_a_valid_policy(node: Any) -> None:
    await node.loop.start()
    rng = random.Random(10)
    choices = {
        "hot.max": (1, 2, 3, 4, 8, "much"),
        "hot.min": (1, 2, 3, 0),
        "hot.start": (1, 2, 2.5, 4),
        "rebalance.cool_down": ("1s", "5s", "10s", "soon"),
        "rebalance.cool_down_towards_safety": ("0s", "2s", "20s"),
        "pools.offload.floor": ("1%", "10%", "45%", "60%"),
        "pools.offload.ceiling": ("5%", "20%", "50%"),
        "levers.split.mode": ("act", "off", None),
    }
    refused = 0
    for _ in range(300):
        key = rng.choice(list(choices))
        try:
            if rng.random() < 0.3:
                node.operator.unset_value(key, actor="storm")
            else:
                for_s = rng.choice((0.5, 3.0, 20.0, None))
                value = rng.choice(choices[key])
                node.operator.set_value(key, value, for_s=for_s, actor="storm")
        except (ConfigError, LookupError):
            refused += 1
        policy = node.source.in_force.policy
        numbers = [policy.hot.min, policy.hot.start, policy.hot.max]
        in_order = [number for number in numbers if not isinstance(number, str)]
        assert in_order == sorted(in_order)
        assert Policy.model_validate(policy.model_dump()) == policy
        if rng.random() < 0.3:
            await node.ticks(1)
    assert 30 < refused < 270
    assert node.current.counters.failed_ticks == 0


@pytest.mark.parametrize("text", BAD)
async def test_each_of_the_bad_ones_is_bad(make_node: Any, text: str) -> None:
    node = make_node(GOOD.format(2))
    await node.loop.start()
    node.policy_path.write_text(text)
    assert node.operator.reload(actor="ann").outcome == "rejected"


def test_an_action_for_an_older_policy_is_refused_whole(node: Any) -> None:
    node.policy_path.write_text("version: 1\n")
    node.operator.reload(actor="ann", expected_generation=1)
    with pytest.raises(StaleGenerationError, match="generation 2, not 1"):
        node.operator.freeze([Lever.SPLIT], actor="ben", expected_generation=1)
    assert node.holds.frozen == frozenset()


async def test_a_document_that_was_cut_off_says_which_keys_have_their_defaults(
    make_node: Any,
) -> None:
    whole = (
        "version: 1\ntick: 2s\nrebalance:\n  window: 3s\n  margin: 30%\nhot: {max: 3, start: 2}\n"
    )
    node = make_node(whole)
    cut = whole[: whole.index("  margin")]
    assert node.source.judge(cut).left_out == ("rebalance.margin", "hot.max", "hot.start")
    node.policy_path.write_text(cut)
    reload = node.operator.reload(actor="ann")
    assert reload.outcome == "loaded"
    assert reload.left_out == ("rebalance.margin", "hot.max", "hot.start")
    (event,) = await node.journal.events(1)
    assert event.sentence.endswith(
        "3 keys return to their defaults: rebalance.margin, hot.max, hot.start."
    )
    node.policy_path.write_text(whole)
    assert node.operator.reload(actor="ann").left_out == ()
    node.policy_path.write_text(whole.replace("margin: 30%", "margin: 20%"))
    assert node.operator.reload(actor="ann").left_out == (), "another value is no key that is gone"
