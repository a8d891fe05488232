"""Good documents made bad: lines dropped, swapped, cut; values at the ends of what can be written.

Pure; the same generator of random numbers gives the same documents.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from pydantic import BaseModel

from hisparsed.policy.keys import leaves, settable_keys
from hisparsed.policy.schema import Policy

VALUES = (
    "", "null", "true", "off", "-1", "0", "9" * 60, "1.5e400", "4 GB/s", "{}", "[]", "[[[", "{a: ",
    "*x", "&x y", "&x [*x]", "!!int x", "!!set {a}", "'", '"\\x', "|\n  a", "<<: 1", "? x", "- - -",
    "%TAG", "\x00", "\ud800", "\u2028", "💥", "12:30", "nan", ".inf", "@", "`", "{{ x }}", "%s",
)  # fmt: skip
EXTREMES = (
    "1e300", "-1e300", "1e308", "1.7976931348623157e308", "5e-324", "9" * 40, "-" + "9" * 39,
    "1e18", "4611686018427387904", "9223372036854775808", "0", "1e-300", "99999999d", "1e9",
    f"{'9' * 40}d", f"{'9' * 30}h", f"{'9' * 30}GiB", f"0.{'0' * 60}1%", f"{'9' * 4000}s",
    r'"\ud800"', r'"a\udfffb"', r'"\u202e"', r'"\e[31m"', r'"\0"', r'["\ud800"]', r'{"\ud800": 1}',
)  # fmt: skip
"""Values of one line, as YAML would have them."""
PLAUSIBLE = (
    "0%", "10%", "100%", "0", "1", "1.5", "3", "1000", "50ms", "30s", "2h", "3650d", "1MiB",
    "64KiB", "2GiB", "900TiB", "auto", "null", "act", "off", "restart", "fixed", "true",
)  # fmt: skip


def _split(line: str) -> tuple[str, str]:
    key, separator, _ = line.partition(":")
    return key + separator, separator


def _new_value(lines: list[str], at: int, rng: random.Random) -> None:
    key, separator = _split(lines[at])
    value = rng.choice(VALUES + EXTREMES)
    lines[at] = f"{key} {value}" if separator else value


def _new_key(lines: list[str], at: int, rng: random.Random) -> None:
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    lines[at] = f"{indent}{rng.choice(VALUES + EXTREMES)}: 1"


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


def _plausible(lines: list[str], at: int, rng: random.Random) -> None:
    key, separator = _split(lines[at])
    if separator and lines[at].strip() != key.strip():
        lines[at] = f"{key} {rng.choice(PLAUSIBLE)}"


Damage = Callable[[list[str], int, random.Random], None]

MISTAKES: tuple[Damage, ...] = (
    _new_value, _new_value, _new_key, _repeat, _drop, _indent, _dedent, _swap, _damage_a_character,
    _cut,
)  # fmt: skip
DAMAGES: tuple[Damage, ...] = (_new_value, *MISTAKES, *(_plausible,) * 11)
"""As many that a document may well survive."""


def damaged(text: str, rng: random.Random, damages: Sequence[Damage] = DAMAGES) -> str:
    """``text`` after one to three of ``damages``; by default not all of them are errors."""
    lines = text.splitlines()
    for _ in range(rng.randint(1, 3)):
        settings = [at for at, line in enumerate(lines) if line.strip() and line.strip()[0] != "#"]
        if settings:
            rng.choice(damages)(lines, rng.choice(settings), rng)
    return "\n".join(lines)


def with_value(base: str, path: Sequence[str], value: str) -> str:
    """A document of one line, ``base``, and one key more."""
    lines = [line for line in base.splitlines() if not line.startswith(path[0])]
    lines += [f"{'  ' * depth}{part}:" for depth, part in enumerate(path)]
    lines[-1] += f" {value}"
    return "\n".join(lines) + "\n"


def extremes(model: type[BaseModel], base: str) -> Iterator[tuple[str, str]]:
    """Each key's name and a document, with each of the extremes."""
    for key in leaves(model):
        for value in EXTREMES:
            yield key.name, with_value(base, key.path, value)


def every_key() -> str:
    """A policy that writes out every key, and schedules that set some."""
    policy = Policy.model_validate({"version": 1})
    nested: dict[str, Any] = {"version": 1}
    for key in settable_keys().values():
        section = nested
        for part in key.path[:-1]:
            section = section.setdefault(part, {})
        section[key.path[-1]] = key.text(policy)
    return "\n".join([*_yaml(nested), _SCHEDULES])


_SCHEDULES = """\
schedules:
  - name: night
    when: {days: [mon, sun], from: "22:00", to: "06:00", timezone: UTC}
    set: {rebalance.cool_down: 10s, hot.max: 3}
  - name: busy
    when: {pressure: high}
    set:
      admission.max_waiting_sessions: 8
      pools.reserve: 1%
"""


def _yaml(section: dict[str, Any], depth: int = 0) -> Iterator[str]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield f"{'  ' * depth}{name}:"
            yield from _yaml(value, depth + 1)
        else:
            yield f"{'  ' * depth}{name}: {value}"


class Documents:
    """An endless row of documents made from the good ones in ``files`` and from every key."""

    def __init__(self, files: Sequence[Path], rng: random.Random) -> None:
        self._bases = [path.read_text("utf-8") for path in files]
        self._rng = rng

    def __iter__(self) -> Iterator[bytes]:
        while True:
            text = damaged(self._rng.choice(self._bases), self._rng)
            yield self._bytes(text)

    def _bytes(self, text: str) -> bytes:
        data = text.encode("utf-8", "surrogatepass")
        if self._rng.random() < 0.05 and data:
            place = self._rng.randrange(len(data))
            data = data[:place] + bytes([self._rng.randrange(256)]) + data[place + 1 :]
        return data


Call = tuple[str, str, bytes]
"""Method, path and body."""


def calls(rng: random.Random) -> Iterator[Call]:
    """An endless row of calls of the control API, most of them nonsense."""
    keys = [*settable_keys(), "version", "pools", "\ud800", "x\u202ey", "a\nb", ""]
    while True:
        if rng.random() < 0.25:
            yield "GET", _asked(rng), b""
            continue
        path = rng.choice(["set", "set", "set", "unset", "check", "diff", "reload"])
        body: dict[str, Any] = {"actor": rng.choice(["ann", "a" * 65, "\u202e", "x"])}
        if path in ("set", "unset"):
            body["key"] = rng.choice(keys)
        if path == "set":
            body |= {"value": _value(rng), "for_s": rng.choice([None, 1, 1e308, 10**30, -1, 0.5])}
        if path in ("check", "diff"):
            body = {"document": rng.choice(VALUES + EXTREMES)}
        if rng.random() < 0.2:
            body["expected_generation"] = rng.choice([1, 10**30, -1, 2**63])
        yield "POST", f"/v1/policy/{path}", json.dumps(body).encode()


def _asked(rng: random.Random) -> str:
    path = rng.choice(["decisions", "decisions/", "journal/events", "logs", "history", "x"])
    if path.endswith("/"):
        path += rng.choice(["1", "9" * 18, "9" * 19, "9" * 5000, "-1", "1e3", "%ED%A0%80"])
    names = ("limit", "since", "lever", "code", "notable", "at", "span_s", "level", "source", "y")
    query = {rng.choice(names): rng.choice(VALUES + EXTREMES) for _ in range(rng.randrange(3))}
    return f"/v1/{path}?{urlencode(query, errors='surrogatepass')}"


def _value(rng: random.Random) -> Any:
    odd: list[Any] = [10**30, -(10**30), 1e308, 5e-324, True, None, [], {}, "\udfff", 2**64]
    return rng.choice([*odd, *VALUES, *EXTREMES])
