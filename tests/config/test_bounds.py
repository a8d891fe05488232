"""Every number of every document has a least and a most; none is open at an end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel, BeforeValidator

from hisparsed.config.node import NodeConfig
from hisparsed.config.node_description import NodeDescription
from hisparsed.policy.document import parse_document
from hisparsed.policy.keys import leaves
from hisparsed.policy.problems import ConfigError
from hisparsed.policy.schema import Policy
from hisparsed.policy.units import parse_bytes, parse_duration, parse_fraction

_WITH_RANGE = (parse_bytes, parse_duration, parse_fraction)
"""Units, which have their own bounds."""


def numbers(annotation: Any, noted: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """What is noted on each number that ``annotation`` allows."""
    noted += tuple(getattr(annotation, "__metadata__", ()))
    if annotation in (int, float):
        yield noted
    for inner in get_args(annotation):
        if isinstance(inner, type) or get_args(inner):
            yield from numbers(inner, noted)


def is_bounded(noted: tuple[Any, ...]) -> bool:
    if any(isinstance(one, BeforeValidator) and one.func in _WITH_RANGE for one in noted):
        return True
    plain = [inner for one in noted for inner in getattr(one, "metadata", [one])]
    least = any(hasattr(one, "ge") or hasattr(one, "gt") for one in plain)
    return least and any(hasattr(one, "le") or hasattr(one, "lt") for one in plain)


@pytest.mark.parametrize("model", [Policy, NodeConfig, NodeDescription])
def test_every_number_has_both_bounds(model: type[BaseModel]) -> None:
    found = [
        (key.name, is_bounded(noted))
        for key in leaves(model)
        for noted in numbers(key.field.annotation, tuple(key.field.metadata))
    ]
    assert len(found) > 15
    assert [name for name, bounded in found if not bounded] == []


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hot.step", "1e-300", "write 0.01 or more"),
        ("hot.step", "1e300", "write 1000 or less"),
        ("hot.max", "1001", "write 1000 or less"),
        ("hot.pcie_budget", "0B", "write 1MiB or more"),
        ("hot.row_rate", "9000000TiB", "8388608TiB"),
        ("admission.max_running", "1" * 20, "write 1000000 or less"),
        ("admission.max_waiting_sessions", "1" * 20, "write 1000000 or less"),
        ("watermark.value", "1" * 20, "write 1000000000 or less"),
        ("rebalance.step", "1e-300", "0.0001% to 100%"),
        ("rebalance.step", "0.00000001%", "0.0001% to 100%"),
        ("rebalance.window", "5e-324", "1ms to 3650d"),
        ("rebalance.window", "0.0001ms", "1ms to 3650d"),
        ("rebalance.back_off.factor", "1e308", "write 1000 or less"),
        ("stall_after", "1ms", "write 1s or more"),
        ("stale_after", "1e308", "1ms to 3650d"),
    ],
)
def test_a_policy_value_that_makes_no_sense_is_refused_with_its_bound(
    key: str, value: str, words: str
) -> None:
    assert words in refused(Policy, "version: 1", key, value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("cuda.tensor_parallel_size", "999999991", "write 1024 or less"),
        ("cuda.max_num_seqs", "9" * 20, "write 1000000 or less"),
        ("reference.max_model_len", "9" * 20, "write 1000000000 or less"),
        ("reference.seed", str(2**32), "less than 4294967296"),
        ("supervision.hang_after", "1ms", "write 1s or more"),
        ("supervision.window", "1ms", "write 1s or more"),
        ("journal.max_ticks", "9" * 20, "write 1000000000 or less"),
        ("host_budget", "4TiB5", "is not a size"),
        ("host_budget", "9PB", "write 1PiB or less"),
    ],
)
def test_a_node_value_that_makes_no_sense_is_refused_with_its_bound(
    key: str, value: str, words: str
) -> None:
    base = "node: auto" if key == "host_budget" else "host_budget: 1GiB"
    assert words in refused(NodeConfig, base, key, value)


def test_a_restart_for_a_stall_is_not_hasty() -> None:
    text = "version: 1\nstall_after: 9s\nhealth: {on_stall: restart}\n"
    with pytest.raises(ConfigError, match="at least 10s"):
        parse_document(text, "x.yaml", Policy)
    parse_document(text.replace("9s", "10s"), "x.yaml", Policy)
    parse_document(text.replace("restart", "alarm"), "x.yaml", Policy)


def refused(model: type[BaseModel], base: str, key: str, value: str) -> str:
    *sections, name = key.split(".")
    text = f"{base}\n"
    for depth, section in enumerate(sections):
        text += f"{'  ' * depth}{section}:\n"
    text += f"{'  ' * len(sections)}{name}: {value}\n"
    with pytest.raises(ConfigError) as caught:
        parse_document(text, "x.yaml", model)
    return str(caught.value)


@pytest.mark.parametrize("value", [r'"/run/\0"', r'"/run/\e[31m"', r'"/run/\x7f"', r'"/run/\x9b"'])
def test_a_path_with_a_control_character_is_refused(value: str) -> None:
    assert "has a control character" in refused(
        NodeConfig, "host_budget: 1GiB", "control_socket", value
    )


def test_other_characters_that_cannot_be_seen_are_text() -> None:
    text = 'host_budget: 1GiB\nengine_args: {a: "x\\ty\\nz \\u200d \\u202e"}\n'
    config = parse_document(text, "x.yaml", NodeConfig).value
    assert config.engine_args == {"a": "x\ty\nz \u200d \u202e"}
