"""A policy for a part of a node: what a document states for the whole machine, scaled. Pure.

Shares and times need nothing, and rates reach the policy as those of the whole node.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import yaml

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


def policy_of_part(policy: PolicyChoice, scale: Fraction) -> PolicyChoice:
    """``policy`` for ``scale`` of the node; itself where it states nothing of that kind."""
    if policy.text is None or scale == 1:
        return policy
    tree: dict[str, Any] = read_tree(policy.text, policy.name).value
    if not _scale(tree, "", scale):
        return policy
    return replace(policy, text=yaml.safe_dump(tree, sort_keys=False))


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
    if key in _SIZES and _is_size(value):
        return f"{math.floor(parse_bytes(value) * scale)}B"
    return value


def _is_size(value: Any) -> bool:
    if isinstance(value, str):
        return not value.strip().endswith("%")
    return isinstance(value, int) and value > 1
