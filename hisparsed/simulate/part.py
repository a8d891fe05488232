"""A policy for a part of a node: what a document states for the whole machine, scaled. Pure.

Shares and times need nothing, and rates reach the policy as those of the whole node.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import yaml

from hisparsed.policy.pool_sizes import size_or_share
from hisparsed.policy.units import parse_bytes
from hisparsed.policy.yaml_tree import read_tree
from hisparsed.simulate.policies import PolicyChoice

_BOUNDS = ("floor", "ceiling", "start")
_SIZES = {
    *(f"pools.{pool}.{key}" for pool in ("hisparse", "offload") for key in _BOUNDS),
    "pools.reserve",
    "rebalance.dead_band.absolute",
}
"""Bytes where they are no shares."""
_COUNTS = {
    "watermark.value",
    "admission.max_running",
    "admission.max_waiting_sessions",
}
"""Whole numbers; a part of one is rounded up."""


def policy_text_of_part(policy: PolicyChoice, scale: Fraction) -> str | None:
    """The document for ``scale`` of the node; the same where it states nothing of that kind."""
    if policy.text is None or scale == 1:
        return policy.text
    tree: dict[str, Any] = read_tree(policy.text, policy.name).value
    changed = _scale(tree, "", scale)
    return yaml.safe_dump(tree, sort_keys=False) if changed else policy.text


def _scale(section: dict[str, Any], prefix: str, scale: Fraction) -> bool:
    """In place; whether anything changed."""
    changed = False
    for name, value in section.items():
        key = f"{prefix}{name}"
        if key == "schedules":
            for entry in value or ():
                if isinstance(entry.get("set"), dict):
                    changed |= _scale(entry["set"], "", scale)
        elif isinstance(value, dict):
            changed |= _scale(value, f"{key}.", scale)
        else:
            scaled = _scaled(key, value, scale)
            changed |= scaled != value
            section[name] = scaled
    return changed


def _scaled(key: str, value: Any, scale: Fraction) -> Any:
    if key in _COUNTS and isinstance(value, int):
        return math.ceil(value * scale)
    if key in _SIZES and value is not None and size_or_share(value) == "size":
        return f"{math.floor(parse_bytes(value) * scale)}B"
    return value
