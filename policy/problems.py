"""Problems of a document: what is wrong, where, and the expected value.

`refuse` is for validators, `Problem` and `ConfigError` for code that shows them. Does not find
problems.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic_core import PydanticCustomError

KeyPath = tuple[str | int, ...]

_SHOWN_CHARACTERS = 60
_LINE_CHARACTERS = 100


def printable(text: str, *, lines: bool = True) -> str:
    """``text`` with every character escaped that is not a letter, sign or space.

    Control characters, those that turn the direction of writing, and halves of characters (lone
    surrogates), which UTF-8 does not take. ``lines``: ends of lines and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or (lines and one in "\n\t") else _escaped(one) for one in text
    )


def _escaped(one: str) -> str:
    return one.encode("unicode_escape").decode("ascii")


def shown(value: object) -> str:
    """A value as it looks in a document, on one line and cut where it is long."""
    text = printable(json.dumps(value, ensure_ascii=False, default=str), lines=False)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return text[: _SHOWN_CHARACTERS - 3] + "..."


def key_text(path: KeyPath) -> str:
    """("pools", 0, "floor") as "pools[0].floor"."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return printable(text, lines=False)


def refuse(
    kind: str, message: str, *, hint: str = "", key: Sequence[str | int] = ()
) -> PydanticCustomError:
    """The error for a validator to raise; ``message`` is one clause that names the value.

    ``key`` is for validators of a whole model: the path, from that model, of the key to point at.
    """
    return PydanticCustomError(
        # The text comes from outside as a value, since braces in it would be taken for fields.
        f"refused_{kind}",
        "{message}",
        {"message": message, "hint": hint, "key": tuple(key)},
    )


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. Lines and columns count from 1; 0 is the file as a whole."""

    file: str
    line: int
    column: int
    key: KeyPath
    value: str
    """As written, shortened; empty where there is none."""
    message: str
    hint: str = ""

    @property
    def words(self) -> str:
        """What is wrong and the expected value, without the place."""
        words = f"{self.message}; {self.hint}" if self.hint else self.message
        return printable(words, lines=False)

    def __str__(self) -> str:
        file = printable(self.file, lines=False)
        place = f"{file}:{self.line}" if self.line else file
        key = f"{key_text(self.key)}: " if self.key else ""
        return f"{place}: {key}{self.words}"


@dataclass
class ConfigError(Exception):
    """A document cannot be used; holds every problem found, in line order.

    ``str()`` is one line per problem, ``render()`` shows the offending lines too.
    """

    problems: tuple[Problem, ...]
    text: str = field(default="", repr=False)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)

    def render(self) -> str:
        """The problems, each with its line of the document and a mark below the place."""
        lines = self.text.splitlines()
        blocks = []
        for problem in self.problems:
            blocks.append(str(problem))
            if 0 < problem.line <= len(lines):
                source, column = _around(_visible(lines[problem.line - 1]), problem.column)
                number = str(problem.line)
                mark = " " * (column - 1) + "^"
                blocks.append(f"  {number} | {source}")
                blocks.append(f"  {' ' * len(number)} | {mark}")
        return "\n".join(blocks)


def _visible(line: str) -> str:
    """One character for each, so that a mark below it is in the right column."""
    line = line.expandtabs(1)
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in line)


def _around(line: str, column: int) -> tuple[str, int]:
    """A long line cut to the part around ``column``, and the new column."""
    start = max(0, min(column - 1 - _LINE_CHARACTERS // 2, len(line) - _LINE_CHARACTERS))
    end = start + _LINE_CHARACTERS
    before, after = "..." if start else "", "..." if end < len(line) else ""
    return f"{before}{line[start:end]}{after}", column - start + len(before)
