"""Configuration documents: YAML text in, a validated model out, or every problem with its line.

Used by the node's configuration and by the policy. Not here: what the settings mean, and watching
files for changes.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from hisparsed.policy.problems import (
    ConfigError,
    KeyPath,
    Problem,
    key_text,
    printable,
    refuse,
)
from hisparsed.policy.validation_problems import locate, problems_of
from hisparsed.policy.yaml_tree import MAX_BYTES, Position, read_tree

__all__ = [
    "ConfigError",
    "Loaded",
    "NotAFileError",
    "Position",
    "Problem",
    "key_text",
    "load_document",
    "parse_document",
    "read_document",
    "refuse",
]

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Loaded(Generic[M]):
    """A document that was read and found valid."""

    value: M
    content_hash: str
    """SHA-256 of the text in UTF-8, hexadecimal."""
    path: Path
    """Where it came from; for text without a file, its name."""
    positions: Mapping[KeyPath, Position]
    """Where each key that was written stands, by its path."""
    text: str
    written: Mapping[str, Any]
    """What was written, as plain values: without defaults, units not yet read."""

    def problem(self, key: KeyPath, message: str, hint: str = "") -> Problem:
        """A problem with ``key`` found later, such as one that needs the node to be known."""
        return locate(self.positions, str(self.path), key, message, hint)

    def error(self, *problems: Problem) -> ConfigError:
        """The error to raise for problems found later, in line order."""
        return _error(list(problems), self.text)


class NotAFileError(OSError):
    """A pipe or a device: reading it could wait for ever, or never end."""


def read_document(path: Path) -> bytes:
    """The content, cut one byte after ``MAX_BYTES``; never waits for a writer.

    Raises ``OSError``, and ``NotAFileError`` for what is no file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise NotAFileError(errno.EINVAL, "not a file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(MAX_BYTES + 1)
    finally:
        os.close(descriptor)


def load_document(path: Path, model: type[M]) -> Loaded[M]:
    """Read and validate the file at ``path``.

    Raises ``ConfigError`` with all problems in line order, also where there is no such file.
    """
    name = printable(str(path))
    try:
        data = read_document(path)
    except FileNotFoundError:
        raise _unreadable(name, "there is no such file") from None
    except IsADirectoryError:
        raise _unreadable(name, "is a folder; name a file") from None
    except NotAFileError:
        raise _unreadable(name, "is a pipe or a device; name a file") from None
    except OSError as error:
        raise _unreadable(name, f"cannot be read: {error.strerror or error}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if len(data) > MAX_BYTES:  # cut in the middle of a character
            text = data.decode("utf-8-sig", "replace")
        else:
            before = data[: error.start]
            line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
            message = f"the byte 0x{data[error.start]:02X} is not UTF-8"
            problem = Problem(name, line, column, (), "", message, "save the file as UTF-8")
            raise ConfigError((problem,), data.decode("utf-8", "replace")) from None
    return parse_document(text, name, model)


def parse_document(text: str, name: str, model: type[M]) -> Loaded[M]:
    """Validate ``text``; ``name`` is what errors call it. Raises ``ConfigError``."""
    tree = read_tree(text, name)
    problems = list(tree.problems)
    try:
        value = model.model_validate(tree.value)
    except ValidationError as error:
        problems += problems_of(error, tree, model)
        raise _error(problems, text) from None
    if problems:
        raise _error(problems, text)
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return Loaded(value, digest, Path(name), tree.positions, text, tree.value)


def _error(problems: list[Problem], text: str) -> ConfigError:
    return ConfigError(tuple(sorted(problems, key=lambda p: (p.line, p.column))), text)


def _unreadable(name: str, message: str) -> ConfigError:
    return ConfigError((Problem(name, 0, 0, (), "", message),))
