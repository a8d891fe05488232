"""Reads lines and fields of a trace file and turns every defect into a `UserError`.

The error names file, line, field, the value found and what would be right. Knows no trace format.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hisparsed.errors import UserError

_GZIP_MAGIC = b"\x1f\x8b"
_MAX_COUNT = 1 << 32


def _text_lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open("rb") as probe:
            zipped = probe.read(2) == _GZIP_MAGIC
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{path}: cannot read the file: {reason}; name a readable file") from error
    number = 0
    try:
        with gzip.open(path, "rb") if zipped else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                text = line.decode("utf-8").strip()
                if text:
                    yield number, text
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            f"{path}: line {number + 1}: the gzip data is torn ({error}); "
            "the file is not complete: fetch it again"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: line {number}: not UTF-8 text ({error.reason})") from error


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, text) of every line that is not blank, unzipped if it is gzip.

    Raises UserError for a file that is missing, torn, not text or empty.
    """
    empty = True
    for numbered in _text_lines(path):
        empty = False
        yield numbered
    if empty:
        raise UserError(f"{path}: the file is empty; at least one line is needed")


@dataclass(frozen=True, slots=True)
class Record:
    """One JSON object of a file, with the place it came from for error messages."""

    path: Path
    line: int
    where: str
    values: dict[str, Any]

    @classmethod
    def parse(cls, path: Path, line: int, text: str) -> "Record":
        """The object on one line; UserError when it is not a JSON object."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}: line {line}: not JSON at column {error.colno} ({error.msg}); "
                "each line must be one JSON object"
            ) from error
        if not isinstance(values, dict):
            raise UserError(f"{path}: line {line}: {text[:40]!r} is not a JSON object")
        return cls(path, line, "", values)

    def wrong(self, key: str, right: str) -> UserError:
        """The error for field `key`: `right` says what it should be."""
        found = f"found {self.values[key]!r:.60}" if key in self.values else "the field is missing"
        return UserError(f"{self.path}: line {self.line}: {self.where}{key}: {found}; need {right}")

    def count(self, key: str, least: int = 0) -> int:
        """A whole number of at least `least`."""
        value = self.values.get(key)
        if type(value) is not int or not least <= value < _MAX_COUNT:
            raise self.wrong(key, f"a whole number of {least} or more")
        return value

    def seconds(self, key: str) -> float:
        """A finite number of 0 or more."""
        value = self.values.get(key)
        number = type(value) is int or type(value) is float
        if value is None or not number or not 0 <= value < float("inf"):
            raise self.wrong(key, "a number of 0 or more")
        return float(value)

    def optional_seconds(self, key: str) -> float | None:
        """As `seconds`, or None where the field is missing or null."""
        return None if self.values.get(key) is None else self.seconds(key)

    def text(self, key: str) -> str:
        """A string that is not empty."""
        value = self.values.get(key)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "a text that is not empty")
        return value

    def items(self, key: str) -> list[Any]:
        """A list that is not empty."""
        value = self.values.get(key)
        if not isinstance(value, list) or not value:
            raise self.wrong(key, "a list that is not empty")
        return value

    def children(self, key: str) -> "list[Record]":
        """The objects of the list `key`, each knowing its place."""
        records = []
        for index, value in enumerate(self.items(key)):
            where = f"{self.where}{key}[{index}]."
            if not isinstance(value, dict):
                raise self.wrong(key, f"an object at position {index}, not {value!r:.40}")
            records.append(Record(self.path, self.line, where, value))
        return records
