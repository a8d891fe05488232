"""The keys of a document: their dotted names, their values as text, and what differs between two.

A key is a leaf of the model, such as ``hot.max`` of the policy. ``changes`` compares two policies
key by key; ``AT_START`` names the keys that a running node cannot take over. The meaning of a key
is its docstring in the schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final, get_args

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from hisparsed.policy.schema import Policy
from hisparsed.policy.units import (
    exact_bytes,
    format_bytes,
    format_duration,
    format_fraction,
    parse_bytes,
    parse_duration,
    parse_fraction,
)

SCHEDULES: Final = "schedules"
_NOT_SETTABLE: Final = frozenset({"version", SCHEDULES})


@dataclass(frozen=True, slots=True)
class Key:
    """One leaf. ``path`` leads from the document to it."""

    path: tuple[str, ...]
    field: FieldInfo

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def value(self, document: BaseModel) -> Any:
        found: Any = document
        for part in self.path:
            found = getattr(found, part)
        return found

    def text(self, document: BaseModel) -> str:
        """Its value in ``document``, as an operator writes it; reads back as the same value."""
        return self.write(self.value(document))

    def write(self, value: Any) -> str:
        """A value of this key as an operator writes it."""
        if value is None or isinstance(value, bool):
            return json.dumps(value)
        if isinstance(value, str):
            return str(value)
        for parse, format_ in _UNITS.items():
            if parse in _parsers(self.field) and isinstance(value, _READS[parse]):
                text = format_(value)
                # Rounded for people; what would not read back the same is written in full.
                return text if parse(text) == value else _IN_FULL[parse](value)
        if isinstance(value, int | float):
            return f"{value:g}" if float(f"{value:g}") == value else repr(value)
        return json.dumps(value, default=str) if isinstance(value, dict) else str(value)


_UNITS: Final[Mapping[Callable[[object], Any], Callable[[Any], str]]] = {
    parse_bytes: format_bytes,
    parse_duration: format_duration,
    parse_fraction: format_fraction,
}
_READS: Final[Mapping[Callable[[object], Any], type]] = {
    parse_bytes: int,
    parse_duration: float,
    parse_fraction: float,
}
_IN_FULL: Final[Mapping[Callable[[object], Any], Callable[[Any], str]]] = {
    parse_bytes: exact_bytes,
    parse_duration: repr,
    parse_fraction: repr,
}


@cache
def policy_keys() -> Mapping[str, Key]:
    """Every key by its dotted name, in the document's order."""
    return MappingProxyType({key.name: key for key in leaves(Policy)})


@cache
def settable_keys() -> Mapping[str, Key]:
    """Those that a schedule or an operator may set."""
    return MappingProxyType(
        {name: key for name, key in policy_keys().items() if name not in _NOT_SETTABLE}
    )


def leaves(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[Key]:
    """Every key of a document's model, in order."""
    for name, field in model.model_fields.items():
        path = (*above, field.alias or name)
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from leaves(inner, path)
        else:
            yield Key(path, field)


def unit_of(field: FieldInfo) -> str:
    """The kind of its values, in a word or two: such as "time" or "size or share"."""
    parsers = _parsers(field)
    names = {parse_bytes: "size", parse_duration: "time", parse_fraction: "share"}
    return " or ".join(word for parse, word in names.items() if parse in parsers)


def _parsers(field: FieldInfo) -> frozenset[Any]:
    return frozenset(_functions(field.metadata)) | frozenset(_functions([field.annotation]))


def _functions(parts: Any) -> Iterator[Any]:
    """The functions that read a value, however deep in unions and annotations."""
    for part in parts:
        if isinstance(part, BeforeValidator):
            yield part.func
        yield from _functions(get_args(part))
        yield from _functions(getattr(part, "__metadata__", ()))


@dataclass(frozen=True, slots=True)
class Change:
    """``None`` where a schedule entry is only in one of them; values as an operator writes them."""

    key: str
    active: str | None
    new: str | None


def changes(active: Policy, new: Policy) -> list[Change]:
    """In the document's order, schedule entries (by name) last; empty for equal policies."""
    found = []
    for name, key in settable_keys().items():
        before, after = key.text(active), key.text(new)
        if before != after:
            found.append(Change(name, before, after))
    return [*found, *_schedules(active, new)]


def _schedules(active: Policy, new: Policy) -> Iterator[Change]:
    before, after = _entries(active), _entries(new)
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            yield Change(f"{SCHEDULES}.{name}", before.get(name), after.get(name))
    common = [name for name in before if name in after]
    if common != [name for name in after if name in before]:
        yield Change(SCHEDULES, ", ".join(before), ", ".join(after))


def _entries(policy: Policy) -> dict[str, str]:
    return {
        entry.name: json.dumps(entry.model_dump(mode="json", exclude_unset=True, exclude={"name"}))
        for entry in policy.schedules
    }


@dataclass(frozen=True, slots=True)
class PendingRestart:
    """A value that only a restart puts in force; both as an operator writes them."""

    key: str
    running: str
    wanted: str


AT_START: Final = {
    "pools.hisparse.start": "at start; live with `rebalance.strategy: fixed`",
    "pools.offload.start": "at start; live with `rebalance.strategy: fixed`",
    "hot.start": "at start",
    "hot.max": "live up to what the engine was started with; more needs a restart",
}
"""When keys take effect that do not, or not always, at the next tick."""
