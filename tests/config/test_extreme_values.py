"""Every key of both documents with values at the ends of what YAML and Python can write.

The answer is a document that can be shown, or a ``ConfigError`` that can be printed; never another
exception.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from hisparsed.config.node import NodeConfig
from hisparsed.policy.document import Loaded, parse_document
from hisparsed.policy.effective import check_policy
from hisparsed.policy.keys import leaves
from hisparsed.policy.problems import ConfigError
from hisparsed.policy.schema import Policy

EXTREMES = (
    "1e300", "-1e300", "1e308", "1.7976931348623157e308", "5e-324", "9" * 40, "-" + "9" * 39,
    "1e18", "4611686018427387904", "9223372036854775808", "0", "1e-300", "99999999d", "1e9",
    f"{'9' * 40}d", f"{'9' * 30}h", f"{'9' * 30}GiB", f"0.{'0' * 60}1%", f"{'9' * 4000}s",
    r'"\ud800"', r'"a\udfffb"', r'"\u202e"', r'"\e[31m"', r'"\0"', r'["\ud800"]', r'{"\ud800": 1}',
)  # fmt: skip
BASE = {Policy: "version: 1\n", NodeConfig: "host_budget: 1GiB\n"}


def documents(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Each key's name and a document, with each of the extremes."""
    for key in leaves(model):
        for value in EXTREMES:
            lines = [line for line in BASE[model].splitlines() if not line.startswith(key.path[0])]
            for depth, part in enumerate(key.path):
                lines.append(f"{'  ' * depth}{part}:")
            lines[-1] += f" {value}"
            yield key.name, "\n".join(lines) + "\n"


def shown(loaded: Loaded[BaseModel]) -> str:
    if isinstance(loaded.value, Policy):
        check_policy(loaded)  # type: ignore[arg-type]
    return "".join(key.text(loaded.value) for key in leaves(type(loaded.value)))


@pytest.mark.parametrize("model", [Policy, NodeConfig])
def test_every_extreme_ends_in_words(model: type[BaseModel]) -> None:
    bad = []
    for name, text in documents(model):
        try:
            words = shown(parse_document(text, "x.yaml", model))
        except ConfigError as error:
            words = error.render() + str(error)
            words.encode()
            assert "x.yaml" in words, text
        except Exception as error:
            bad.append((name, text[-60:], repr(error)[:80]))
            continue
        try:
            words.encode()
        except UnicodeEncodeError:
            bad.append((name, text[-60:], "not printable"))
    assert bad == []
