"""Schema file, reference page and shipped policies: current, complete, and in agreement.

The policy that ships is the defaults, spelled out; the documentation names every reason code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from hisparsed.policy.bounds import problems
from hisparsed.policy.decisions import ACTING, Reason
from hisparsed.policy.document import load_document
from hisparsed.policy.effective import check_policy, load_policy, parse_policy
from hisparsed.policy.keys import AT_START, policy_keys, settable_keys
from hisparsed.policy.problems import ConfigError
from hisparsed.policy.schedules import Schedule, When
from hisparsed.policy.schema import Policy
from hisparsed.policy.schema_docs import policy_json_schema, reference_page, schema_text
from hisparsed.policy.signals import Lever

ROOT = Path(__file__).parents[2]
SHIPPED = [ROOT / "etc" / "policy.yaml", *sorted((ROOT / "etc" / "policies").glob("*.yaml"))]
VALIDATOR = Draft202012Validator(policy_json_schema())
REGENERATE = "run `hisparsed policy {} > {}`"


def accepts(document: Any) -> bool:
    return bool(VALIDATOR.is_valid(document))


def test_the_schema_file_is_current() -> None:
    path = "etc/policy.schema.json"
    assert (ROOT / path).read_text("utf-8") == schema_text(), REGENERATE.format("schema", path)


def test_the_schema_is_a_schema() -> None:
    Draft202012Validator.check_schema(json.loads(schema_text()))


def test_the_reference_page_is_current() -> None:
    path = "docs/policy-reference.md"
    page = (ROOT / path).read_text("utf-8")
    assert page == reference_page(), REGENERATE.format("reference", path)


def test_every_key_is_described_in_the_reference() -> None:
    page = reference_page()
    for name, key in settable_keys().items():
        assert key.field.description, f"{name} needs a docstring below it in the schema"
        assert f"| `{name}` |" in page
    for model in (Schedule, When):
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name} needs a docstring below it"


def test_keys_that_wait_for_a_start_exist() -> None:
    assert set(AT_START) <= set(policy_keys())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_policies_are_valid_and_say_for_whom(path: Path, kit: Any) -> None:
    checked = load_policy(path)
    check_policy(checked.loaded, (), lambda policy: problems(policy, kit.geometry))
    assert accepts(checked.loaded.written)
    text = checked.loaded.text
    assert "\n# For: " in text
    (first, *_) = text.splitlines()
    marker, place = first.split("=")
    assert marker == "# yaml-language-server: $schema"
    assert (path.parent / place).resolve() == ROOT / "etc" / "policy.schema.json"


def test_five_policies_are_shipped() -> None:
    names = [path.stem for path in SHIPPED]
    assert names == ["policy", "agentic", "conservative", "fixed-384-128", "latency-first"]


def test_the_fixed_policy_is_the_published_split() -> None:
    policy = load_policy(ROOT / "etc" / "policies" / "fixed-384-128.yaml").loaded.value
    assert policy.rebalance.strategy == "fixed"
    starts = [policy.pools.hisparse.start, policy.pools.offload.start]
    assert [share * 512 for share in starts if share is not None] == [384, 128]


@pytest.mark.parametrize(
    "sections",
    [
        {"tick": "1s"},
        {"tick": 1},
        {"tick": "1h30m", "stale_after": "3h"},
        {"rebalance": {"hold_off": 0}},
        {"pools": {"offload": {"floor": "1.5GiB"}}},
        {"pools": {"offload": {"floor": "5%"}}},
        {"pools": {"offload": {"floor": 0}}},
        {"pools": {"offload": {"floor": 0.05, "ceiling": 2**40}}},
        {"hot": {"pcie_budget": "20GiB"}},
        {"rebalance": {"margin": "12.5 %"}},
        {"watermark": {"value": None}},
        {"schedules": [{"name": "a", "when": {"pressure": "high"}, "set": {"hot.max": 3}}]},
        {
            "schedules": [
                {"name": "a", "when": {"from": "22:00", "to": "06:00"}, "set": {"tick": "2s"}}
            ]
        },
    ],
)
def test_the_schema_accepts_what_the_daemon_accepts(sections: dict[str, Any]) -> None:
    document = {"version": 1, **sections}
    Policy.model_validate(document)
    parse_policy(json.dumps(document), "p.yaml")
    assert accepts(document)


@pytest.mark.parametrize(
    "sections",
    [
        {"tick": "1 second"},
        {"tick": ""},
        {"tick": -1},
        {"tock": "1s"},
        {"mode": "on"},
        {"pools": {"offload": {"floor": "5 percent"}}},
        {"hot": {"pcie_budget": 20}},
        {"hot": {"pcie_budget": "20Gib"}},
        {"rebalance": {"margin": 1.5}},
        {"watermark": {"value": "lots"}},
        {"schedules": [{"name": "a", "when": {"pressure": "high"}, "set": {"hot.mx": 3}}]},
        {"schedules": [{"name": "a", "when": {"pressure": "high"}, "set": {"hot.max": "much"}}]},
        {"schedules": [{"name": "a", "when": {"from": "9:00", "to": "10:00"}, "set": {"tick": 1}}]},
        {"schedules": [{"name": "a", "when": {"pressure": "high"}, "set": {}}]},
    ],
)
def test_the_schema_refuses_what_the_daemon_refuses(sections: dict[str, Any]) -> None:
    document = {"version": 1, **sections}
    with pytest.raises(ConfigError):
        parse_policy(json.dumps(document), "p.yaml")
    assert not accepts(document)


def test_a_version_must_be_given() -> None:
    assert not accepts({})
    assert not accepts({"version": 2})


def leaf_keys(value: object, prefix: str = "") -> set[str]:
    if not isinstance(value, dict):
        return {prefix}
    return {key for name, item in value.items() for key in leaf_keys(item, f"{prefix}.{name}")}


def test_shipped_policy_is_the_defaults_spelled_out() -> None:
    loaded = load_document(ROOT / "etc" / "policy.yaml", Policy).value
    defaults = Policy(version=1)
    without_levers = {"exclude": {"levers"}}
    assert loaded.model_dump(**without_levers) == defaults.model_dump(**without_levers)
    assert all(loaded.mode_of(lever) is defaults.mode_of(lever) for lever in Lever)


def test_shipped_policy_shows_every_key() -> None:
    loaded = load_document(ROOT / "etc" / "policy.yaml", Policy).value
    assert leaf_keys(loaded.model_dump(exclude_unset=True)) == leaf_keys(loaded.model_dump())


def test_documentation_explains_every_reason() -> None:
    text = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")
    explained = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    assert {reason.value for reason in Reason} <= explained


def test_codes_either_act_or_hold() -> None:
    assert Reason.OFFLOAD_SHORT_OF_REACH.acts
    assert not Reason.IN_DEAD_BAND.acts
    assert len(ACTING) == 14
