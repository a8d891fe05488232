"""The policy that ships is the defaults, spelled out; the documentation names every code."""

from __future__ import annotations

from pathlib import Path

from hisparsed.policy.document import load_document
from hisparsed.policy.reasons import ACTING, Lever, Reason
from hisparsed.policy.schema import Policy

ROOT = Path(__file__).parents[2]


def keys(value: object, prefix: str = "") -> set[str]:
    if not isinstance(value, dict):
        return {prefix}
    return {key for name, item in value.items() for key in keys(item, f"{prefix}.{name}")}


def test_shipped_policy_is_the_defaults_spelled_out() -> None:
    loaded = load_document(ROOT / "etc" / "policy.yaml", Policy).value
    defaults = Policy(version=1)
    without_levers = {"exclude": {"levers"}}
    assert loaded.model_dump(**without_levers) == defaults.model_dump(**without_levers)
    assert all(loaded.mode_of(lever) is defaults.mode_of(lever) for lever in Lever)


def test_shipped_policy_shows_every_key() -> None:
    loaded = load_document(ROOT / "etc" / "policy.yaml", Policy).value
    assert keys(loaded.model_dump(exclude_unset=True)) == keys(loaded.model_dump())


def test_documentation_explains_every_reason() -> None:
    text = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")
    explained = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    assert {reason.value for reason in Reason} <= explained


def test_codes_either_act_or_hold() -> None:
    assert Reason.OFFLOAD_SHORT_OF_REACH.acts
    assert not Reason.IN_DEAD_BAND.acts
    assert len(ACTING) == 14
