"""Configuration documents: YAML text in, a validated model out, or every problem with its line.

The node's configuration and the policy both use it. ``load_document`` and ``parse_document`` read
and validate; ``problems_of`` puts pydantic's validation errors in an operator's words and knows how
pydantic's locations relate to what was written. Does not define the settings and does not watch
files.
"""

import contextlib
import difflib
import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Generic, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from hisparsed.policy.problems import (
    ConfigError,
    KeyPath,
    Problem,
    key_text,
    printable,
    refuse,
    shown,
)
from hisparsed.policy.units import format_bytes, format_duration, parse_bytes, parse_duration
from hisparsed.policy.yaml_tree import MAX_BYTES, Position, Tree, read_tree

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
    """The place of each key that was written, by its path."""
    text: str
    written: Mapping[str, Any]
    """The document as plain values: without defaults, units not yet read."""

    def problem(self, key: KeyPath, message: str, hint: str = "") -> Problem:
        """A problem with ``key`` found later, such as one that needs the node to be known."""
        return locate(self.positions, str(self.path), key, message, hint)

    def error(self, *problems: Problem) -> ConfigError:
        """The error to raise for problems found later, in line order."""
        return _error(list(problems), self.text)


class NotAFileError(OSError):
    """A pipe or a device: reading it could wait forever, or never end."""


def read_document(path: Path) -> bytes:
    """The content, cut one byte after ``MAX_BYTES``; never waits for a writer.

    Raises ``OSError``, and ``NotAFileError`` for a path that is not a file.
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

    Raises ``ConfigError`` with all problems in line order, also for a missing file.
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


_MISSING: Final = "missing"
_UNKNOWN: Final = "extra_forbidden"
_MAX_KEYS_LISTED: Final = 12

Words = tuple[str, str]
"""Message and hint."""


def problems_of(error: ValidationError, tree: Tree, model: type[BaseModel]) -> list[Problem]:
    """One problem for each thing pydantic found; those the tree already knows are omitted."""
    known = {problem.key for problem in tree.problems}
    problems: dict[tuple[KeyPath, str], Problem] = {}
    for details in error.errors(include_url=False):
        key = _written_path(details, tree)
        if key in known:
            continue
        written = details["input"] if key not in tree.positions else _value_at(tree.value, key)
        message, hint = _words(details, written, key, model)
        value = "" if details["type"] == _MISSING else shown(written)
        problem = locate(tree.positions, tree.name, key, message, hint, value=value)
        if details["type"] in (_MISSING, _UNKNOWN):
            problem = _at_key(tree.positions, problem)
        elif key not in tree.positions or tree.positions[key].value_line != problem.line:
            problem = _at_named(tree.positions, problem)
        problems[key, message] = problem
    return list(problems.values())


def locate(
    positions: Mapping[KeyPath, Position],
    file: str,
    key: KeyPath,
    message: str,
    hint: str = "",
    value: str = "",
) -> Problem:
    """A problem at the value of ``key``, or of the nearest key around it that was written."""
    for length in range(len(key), 0, -1):
        place = positions.get(key[:length])
        if place is not None:
            # A section's value begins a line below; its own line says more.
            inline = length == len(key) and place.value_line == place.line
            column = place.value_column if inline else place.column
            return Problem(file, place.line, column, key, value, message, hint)
    return Problem(file, 1, 1, key, value, message, hint)


def _at_named(positions: Mapping[KeyPath, Position], problem: Problem) -> Problem:
    """A default that conflicts with a key that was written: the problem is at that key, which it
    names."""
    words = re.findall(r"\w+", problem.message)
    for word in words:
        place = positions.get((*problem.key, word))
        if place is not None:
            return replace(problem, line=place.line, column=place.column)
    return problem


def _at_key(positions: Mapping[KeyPath, Position], problem: Problem) -> Problem:
    place = positions.get(problem.key)
    if place is None:
        return problem
    return replace(problem, line=place.line, column=place.column)


def _written_path(details: ErrorDetails, tree: Tree) -> KeyPath:
    """pydantic's location less the parts it adds itself (union members, validator names)."""
    path: KeyPath = ()
    parts = list(details["loc"])
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        if (*path, part) in tree.positions or (is_last and details["type"] == _MISSING):
            path = (*path, part)
    return (*path, *details.get("ctx", {}).get("key", ()))


def _value_at(value: Any, key: KeyPath) -> Any:
    for part in key:
        value = value[part]
    return value


def _words(details: ErrorDetails, value: Any, key: KeyPath, model: type[BaseModel]) -> Words:
    kind, context = details["type"], details.get("ctx", {})
    if kind == _UNKNOWN:
        return "is not a known key", _nearest(str(key[-1]), _keys_at(model, key[:-1]))
    if kind == _MISSING:
        return "is missing", _description(model, key)
    if "message" in context:
        return context["message"], context.get("hint", "")
    if value is None and kind != "value_error":
        return "is empty", "give it a value, or remove the key to use the default"
    translate = _TRANSLATED.get(kind)
    if translate is not None:
        return translate(shown(value), context)
    if kind == "value_error":
        return str(context["error"]), ""
    message = details["msg"]
    if "_" in kind and not kind.startswith(_STOCK):
        return message, ""  # a validator's own sentence
    return f"{shown(value)} is refused: {message[:1].lower()}{message[1:]}", ""


def _choice(value: str, context: Mapping[str, Any]) -> Words:
    expected = str(context["expected"])
    choices = [choice.strip(" '\"") for choice in expected.replace(" or ", ", ").split(",")]
    close = difflib.get_close_matches(value.strip('"'), choices, n=1)
    if len(choices) == 1:
        return f"{value} is not {choices[0]}", f"write {choices[0]}"
    return (
        f"{value} is not one of {', '.join(choices)}",
        f"did you mean {close[0]}?" if close else "",
    )


_TYPES: Final[Mapping[str, Words]] = {
    "string": ("is not text", "put it in quotes"),
    "int": ("is not a whole number", "write digits only"),
    "float": ("is not a number", "write a number such as 2 or 0.5"),
    "bool": ("is neither true nor false", "write true or false"),
    "dict": ("is not a section", "write `key: value` lines below it"),
    "model": ("is not a section", "write `key: value` lines below it"),
    "list": ("is not a list", "write one `- item` line for each"),
    "tuple": ("is not a list", "write one `- item` line for each"),
    "path": ("is not a path", "write a path"),
}
_BOUNDS: Final = {
    "greater_than": ("too small", "more than {gt}"),
    "greater_than_equal": ("too small", "{ge} or more"),
    "less_than": ("too large", "less than {lt}"),
    "less_than_equal": ("too large", "{le} or less"),
    "multiple_of": ("of the wrong step", "a multiple of {multiple_of}"),
}
_STOCK: Final = (*_TYPES, "union", "too_", "finite", "value", "is_", "mapping", "none", "frozen")


def _type_words(words: Words) -> Callable[[str, Mapping[str, Any]], Words]:
    return lambda value, _context: (f"{value} {words[0]}", words[1])


def _bound_words(what: str, right: str) -> Callable[[str, Mapping[str, Any]], Words]:
    def words(value: str, context: Mapping[str, Any]) -> Words:
        bounds = {name: _as_written(value, bound) for name, bound in context.items()}
        return f"{value} is {what}", f"write {right.format(**bounds)}"

    return words


def _as_written(value: str, bound: float) -> str:
    """``bound`` in the kind of unit that ``value`` has."""
    if bound and value.startswith('"'):
        with contextlib.suppress(ValueError):
            parse_duration(json.loads(value))
            return format_duration(bound)
        with contextlib.suppress(ValueError):
            parse_bytes(json.loads(value))
            return format_bytes(int(bound))
    return f"{bound:.15g}"


def _length_words(value: str, context: Mapping[str, Any]) -> Words:
    bounds = [f"at least {context['min_length']}"] if "min_length" in context else []
    bounds += [f"at most {context['max_length']}"] if "max_length" in context else []
    return f"{value} has the wrong length", f"write {' and '.join(bounds)} characters or items"


def _pattern_words(value: str, context: Mapping[str, Any]) -> Words:
    return f"{value} has characters that may not be there", f"it must match {context['pattern']}"


_TRANSLATED: Final[Mapping[str, Callable[[str, Mapping[str, Any]], Words]]] = {
    "enum": _choice,
    "literal_error": _choice,
    "string_pattern_mismatch": _pattern_words,
    "int_from_float": _type_words(_TYPES["int"]),
    **{
        f"{name}_{stage}": _type_words(words)
        for name, words in _TYPES.items()
        for stage in ("type", "parsing")
    },
    **{kind: _bound_words(*words) for kind, words in _BOUNDS.items()},
    **dict.fromkeys(
        ("string_too_short", "string_too_long", "too_short", "too_long"), _length_words
    ),
}


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    if close:
        return f"did you mean {close[0]}?"
    if not known:
        return "remove it"
    listed = ", ".join(known[:_MAX_KEYS_LISTED])
    return f"known here: {listed}{', ...' if len(known) > _MAX_KEYS_LISTED else ''}"


def _description(model: type[BaseModel], key: KeyPath) -> str:
    candidates = _models_at(model, key[:-1])
    for candidate in candidates:
        field = _fields(candidate).get(key[-1])
        if field is not None:
            only = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
            if len(only) == 1 and len(candidates) == 1:
                return f"add {key[-1]}: {only[0]}"
            described = f": {field.description}" if field.description else ""
            return f"add {key[-1]}{described}"
    return f"add {key[-1]}"


def _keys_at(model: type[BaseModel], path: KeyPath) -> list[str]:
    keys = [str(name) for found in _models_at(model, path) for name in _fields(found)]
    return list(dict.fromkeys(keys))


def _models_at(model: type[BaseModel], path: KeyPath) -> list[type[BaseModel]]:
    """The models that are possible at ``path``; several where the model has a union."""
    annotations: list[Any] = [model]
    for part in path:
        annotations = [inner for outer in annotations for inner in _inside(outer, part)]
    return [found for found in annotations if _is_model(found)]


def _fields(model: type[BaseModel]) -> dict[str | int, FieldInfo]:
    """By the names that a document uses."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _inside(annotation: Any, part: str | int) -> list[Any]:
    """The annotation of the value under ``part``, with unions split."""
    if _is_model(annotation):
        field = _fields(annotation).get(part)
        return _alternatives(field.annotation) if field is not None else []
    # dict[str, X], list[X], tuple[X, ...]: the value's type is the last that is one.
    arguments = [argument for argument in get_args(annotation) if argument is not Ellipsis]
    return _alternatives(arguments[-1]) if arguments else []


def _alternatives(annotation: Any) -> list[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _alternatives(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [found for member in get_args(annotation) for found in _alternatives(member)]
    return [annotation]


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
