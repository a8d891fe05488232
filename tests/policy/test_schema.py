"""The policy document: units, defaults and cross-checks that name the key."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from hisparsed.policy.schema import Mode, Policy
from hisparsed.policy.signals import Lever


def policy(**sections: Any) -> Policy:
    return Policy.model_validate({"version": 1, **sections})


def test_units_and_shares() -> None:
    made = policy(
        pools={"hisparse": {"floor": "50%", "ceiling": "384GiB"}, "offload": {"floor": 0}},
        rebalance={"window": "2m", "dead_band": {"absolute": "1GiB"}},
        hot={"pcie_budget": "4GiB"},
    )
    assert made.pools.hisparse.floor == 0.5
    assert made.pools.hisparse.ceiling == 384 * 2**30
    assert isinstance(made.pools.hisparse.ceiling, int)
    assert isinstance(made.pools.offload.floor, float)
    assert made.rebalance.window == 120.0
    assert made.hot.pcie_budget == 4 * 2**30


@pytest.mark.parametrize("whole", [0, 1])
def test_plain_zero_and_one_are_shares_not_bytes(whole: int) -> None:
    made = policy(pools={"hisparse": {"floor": 0}, "offload": {"floor": 0, "ceiling": whole}})
    assert made.pools.offload.ceiling == float(whole)
    assert isinstance(made.pools.offload.ceiling, float)


@pytest.mark.parametrize(
    ("sections", "location", "kind"),
    [
        ({"mod": "act"}, ("mod",), "extra_forbidden"),
        ({"mode": "on"}, ("mode",), "enum"),
        (
            {"pools": {"hisparse": {"floor": "60%", "ceiling": "40%"}}},
            ("pools", "hisparse", "ceiling"),
            "ceiling_below_floor",
        ),
        (
            {"pools": {"offload": {"floor": "2GiB", "ceiling": "1GiB"}}},
            ("pools", "offload", "ceiling"),
            "ceiling_below_floor",
        ),
        (
            {"pools": {"offload": {"floor": "5%", "start": "4%"}}},
            ("pools", "offload", "start"),
            "start_out_of_bounds",
        ),
        (
            {"pools": {"offload": {"ceiling": "20%", "start": "21%"}}},
            ("pools", "offload", "start"),
            "start_out_of_bounds",
        ),
        (
            {"pools": {"hisparse": {"floor": "80%"}, "offload": {"floor": "21%"}}},
            ("pools", "offload"),
            "floors_exceed_budget",
        ),
        (
            {"pools": {"hisparse": {"ceiling": "80%"}, "offload": {"ceiling": "19%"}}},
            ("pools", "offload"),
            "ceilings_below_budget",
        ),
        (
            {"pools": {"hisparse": {"start": "80%"}, "offload": {"start": "19%"}}},
            ("pools", "offload"),
            "starts_not_whole",
        ),
        (
            {"rebalance": {"step": "5%", "step_towards_safety": "4%"}},
            ("rebalance", "step_towards_safety"),
            "safety_step_below_step",
        ),
        (
            {"rebalance": {"cool_down": "5s", "cool_down_towards_safety": "6s"}},
            ("rebalance", "cool_down_towards_safety"),
            "safety_cool_down_above_cool_down",
        ),
        ({"pools": {"offload": {"floor": 2}}}, ("pools", "offload", "floor"), "size_without_unit"),
        (
            {"pools": {"offload": {"ceiling": 100}}},
            ("pools", "offload", "ceiling"),
            "size_without_unit",
        ),
        ({"rebalance": {"step": 0.0}}, ("rebalance", "step"), "greater_than"),
        ({"hot": {"min": 3.0, "start": 2.0}}, ("hot", "start"), "start_out_of_range"),
        ({"hot": {"min": 3.0, "max": 2.0}}, ("hot", "max"), "max_below_min"),
        ({"hot": {"min": 0.5}}, ("hot", "min"), "greater_than_equal"),
        (
            {"admission": {"ageing": "11m"}},
            ("admission", "ageing"),
            "ageing_above_max_wait",
        ),
        (
            {"pools": {"offload": {"floor": "10%"}, "reserve": "41%"}},
            ("pools", "reserve"),
            "reserve_exceeds_budget",
        ),
        ({"hot": {"start": 5.0, "max": 4.0}}, ("hot", "start"), "start_out_of_range"),
        (
            {"hot": {"free_low": "20%", "free_high": "20%"}},
            ("hot", "free_high"),
            "free_high_not_above_low",
        ),
        (
            {"admission": {"engage_at": "50%", "release_at": "50%"}},
            ("admission", "release_at"),
            "release_not_below_engage",
        ),
        ({"tick": "3s", "stale_after": "5s"}, ("stale_after",), "stale_after_too_short"),
        ({"rebalance": {"strategy": "fixed"}}, ("rebalance",), "fixed_without_start"),
    ],
)
def test_refused_with_the_key(sections: dict[str, Any], location: tuple[str], kind: str) -> None:
    with pytest.raises(ValidationError) as caught:
        policy(**sections)
    error = caught.value.errors()[0]
    assert (error["loc"][: len(location)], error["type"]) == (location, kind)


def test_messages_show_values_as_operators_write_them() -> None:
    with pytest.raises(ValidationError, match="the floors 60% and 50% add up to more"):
        policy(pools={"hisparse": {"floor": 0.6}, "offload": {"floor": "50%"}})
    with pytest.raises(ValidationError, match="the ceiling 1GiB is below the floor 2GiB"):
        policy(pools={"offload": {"floor": 2 * 2**30, "ceiling": "1GiB"}})
    with pytest.raises(ValidationError, match=r"is under twice the tick 3s.*use at least 6s"):
        policy(tick="3s", stale_after="5s")


def test_a_dumped_policy_is_the_same_policy() -> None:
    made = policy(pools={"hisparse": {"floor": "384GiB"}, "offload": {"ceiling": "30%"}})
    assert Policy.model_validate(made.model_dump()) == made
    assert Policy.model_validate_json(made.model_dump_json()) == made


def test_every_edge_is_allowed() -> None:
    policy(
        pools={
            "hisparse": {"floor": "60%", "ceiling": "60%", "start": "60%"},
            "offload": {"floor": "40%", "ceiling": "40%", "start": "40%"},
        },
        rebalance={"step": "5%", "step_towards_safety": "5%", "strategy": "fixed"},
        hot={"min": 2, "max": 2, "start": 2},
    )


def test_one_key_of_a_pool_leaves_its_other_defaults() -> None:
    pools = policy(pools={"hisparse": {"ceiling": "99%"}, "offload": {"start": "10%"}}).pools
    assert (pools.hisparse.floor, pools.hisparse.ceiling) == (0.5, 0.99)
    assert (pools.offload.floor, pools.offload.ceiling) == (0.01, 0.5)


def test_version_is_required_and_known() -> None:
    with pytest.raises(ValidationError):
        Policy.model_validate({})
    with pytest.raises(ValidationError):
        Policy.model_validate({"version": 2})


@pytest.mark.parametrize(
    ("whole", "own", "effective"),
    [
        ("act", None, Mode.ACT),
        ("act", "advise", Mode.ADVISE),
        ("act", "off", Mode.OFF),
        ("advise", "act", Mode.ADVISE),
        ("advise", "off", Mode.OFF),
        ("off", "act", Mode.OFF),
    ],
)
def test_the_more_cautious_mode_wins(whole: str, own: str | None, effective: Mode) -> None:
    for lever in Lever:
        made = policy(mode=whole, levers={lever.value: {"mode": own}})
        assert made.mode_of(lever) is effective


@pytest.mark.parametrize(
    "sections",
    [
        {"hot": {"max": True}},
        {"admission": {"max_running": True}},
        {"admission": {"max_context": False}},
        {"rebalance": {"marginal": {"least_gain": True}}},
        {"rebalance": {"back_off": {"factor": True}}},
        {"watermark": {"value": False}},
        {"version": True},
    ],
    ids=str,
)
def test_yes_is_no_number(sections: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        policy(**sections)
    (found,) = caught.value.errors()
    assert found["type"] == "refused_number"
    assert found["msg"].endswith("is not a number")


def test_true_is_still_a_yes() -> None:
    assert policy(pools={"release_reserve": True}).pools.release_reserve
