"""Damaged documents: whatever is done to a good one, the answer is a model or a ConfigError."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel

from hisparsed.config.node import NodeConfig, shipped_config
from hisparsed.policy.document import load_document, parse_document
from hisparsed.policy.problems import ConfigError
from hisparsed.policy.schema import Policy
from tests.examples import examples

MUTATIONS = examples(60, 200)

VALUES = (
    "", "null", "true", "off", "-1", "0", "9" * 60, "1.5e400", "4 GB/s", "{}", "[]", "[[[", "{a: ",
    "*x", "&x y", "&x [*x]", "!!int x", "!!set {a}", "'", '"\\x', "|\n  a", "<<: 1", "? x", "- - -",
    "%TAG", "\x00", "\ud800", "\u2028", "💥", "12:30", "nan", ".inf", "@", "`", "{{ x }}", "%s",
)  # fmt: skip


def _split(line: str) -> tuple[str, str]:
    key, separator, _ = line.partition(":")
    return key + separator, separator


def _new_value(lines: list[str], at: int, rng: random.Random) -> None:
    key, separator = _split(lines[at])
    lines[at] = f"{key} {rng.choice(VALUES)}" if separator else rng.choice(VALUES)


def _new_key(lines: list[str], at: int, rng: random.Random) -> None:
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    lines[at] = f"{indent}{rng.choice(VALUES)}: 1"


def _repeat(lines: list[str], at: int, rng: random.Random) -> None:
    lines.insert(rng.randrange(len(lines) + 1), lines[at])


def _drop(lines: list[str], at: int, rng: random.Random) -> None:
    del lines[at]


def _indent(lines: list[str], at: int, rng: random.Random) -> None:
    lines[at] = rng.choice((" ", "  ", "\t", "- ")) + lines[at]


def _dedent(lines: list[str], at: int, rng: random.Random) -> None:
    lines[at] = lines[at].lstrip()


def _swap(lines: list[str], at: int, rng: random.Random) -> None:
    other = rng.randrange(len(lines))
    lines[at], lines[other] = lines[other], lines[at]


def _damage_a_character(lines: list[str], at: int, rng: random.Random) -> None:
    line = lines[at]
    place = rng.randrange(len(line) + 1)
    lines[at] = line[:place] + rng.choice("{}[]:,&*#?|-<>=!%@\\'\"\t\n\x07 ") + line[place + 1 :]


def _cut(lines: list[str], at: int, rng: random.Random) -> None:
    del lines[at + 1 :]
    lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]


DAMAGES: tuple[Callable[[list[str], int, random.Random], None], ...] = (
    _new_value, _new_value, _new_key, _repeat, _drop, _indent, _dedent, _swap, _damage_a_character,
    _cut,
)  # fmt: skip


def _damaged(text: str, rng: random.Random) -> str:
    lines = text.splitlines()
    for _ in range(rng.randint(1, 3)):
        settings = [at for at, line in enumerate(lines) if line.strip() and line.strip()[0] != "#"]
        if settings:
            rng.choice(DAMAGES)(lines, rng.choice(settings), rng)
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("name", "model"), [("hisparsed.yaml", NodeConfig), ("policy.yaml", Policy)]
)
def test_damage_ends_in_a_model_or_a_config_error(name: str, model: type[BaseModel]) -> None:
    text = shipped_config(name).read_text("utf-8")
    rng = random.Random(20260101)
    refused = 0
    for _ in range(MUTATIONS):
        damaged = _damaged(text, rng)
        try:
            parse_document(damaged, name, model)
        except ConfigError as error:
            refused += 1
            assert error.problems
            lines = [problem.line for problem in error.problems]
            assert lines == sorted(lines)
            assert max(lines) <= damaged.count("\n") + 2
            assert str(error).count(name) >= len(lines)
            assert error.render()
    assert refused > MUTATIONS / 4


def test_random_bytes_end_in_a_config_error(tmp_path: Path) -> None:
    rng = random.Random(7)
    path = tmp_path / "noise.yaml"
    for size in range(1, 400, 7):
        path.write_bytes(rng.randbytes(size))
        with pytest.raises(ConfigError):
            load_document(path, NodeConfig)
