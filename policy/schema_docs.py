"""Generates from the policy's schema the reference page in Markdown and the JSON Schema.

`hisparsed policy reference` and `hisparsed policy schema` print them; tests keep the page in the
documentation and the shipped schema file equal to them. In the JSON Schema sizes, times and shares
are patterns or numbers; rules over two keys are checked by the daemon and by `hisparsed policy
check`, not by the schema.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Any, Final, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hisparsed.policy.keys import AT_START, Key, settable_keys, unit_of
from hisparsed.policy.schedules import MAX_ENTRIES, Day, Pressure, Schedule, When
from hisparsed.policy.schema import Policy
from hisparsed.policy.units import format_bytes, format_duration, format_fraction

_HEAD: Final = """\
# Policy reference

*Reference.* [All pages](README.md)

Every key of `policy.yaml`. Generated from the schema by `hisparsed policy reference`; edit the
descriptions there. [policy.md](policy.md) explains the laws and guards that use these values.

- **size**: a number with a unit (`384GiB`, `1.5TiB`, `512MB`), or plain bytes, 0 or from 1024 on.
- **time**: a number with a unit (`250ms`, `30s`, `5m`, `1h30m`), or plain seconds.
- **share**: a percentage (`5%`), or a number from 0 to 1.
- **size or share**: of the host budget. A plain number from 2 to 100 is rejected as ambiguous.
- **live**: takes effect at the next tick after a reload, a schedule or `hisparsed policy set`.

Editors that support `# yaml-language-server: $schema=policy.schema.json` complete and check keys;
`hisparsed policy schema` prints that schema.
"""
_SCHEDULES: Final = f"""\
## schedules

A list of at most {MAX_ENTRIES} entries. While an entry is active, its values override those of the
document. If several active entries set the same key, the later one in the list applies. Values set
with `hisparsed policy set` override both. When the document is loaded, every set of entries that
can be active at once is checked, and the document is rejected if one of them gives an invalid
policy.

Times are local wall-clock times: an hour that is skipped when summer time begins does not occur,
and an hour that is repeated when it ends occurs twice. Pressure is compared with
`admission.engage_at` and `release_at` of the document: high above the first, low below the second,
unchanged in between. It takes effect at the next tick.

"""
_EXAMPLE: Final = """
```yaml
schedules:
  - name: night
    when: {days: [mon, tue, wed, thu, fri], from: "22:00", to: "06:00", timezone: Europe/Berlin}
    set: {rebalance.cool_down: 10s, hot.max: 6}
  - name: busy
    when: {pressure: high}
    set: {admission.max_waiting_sessions: 8}
```
"""
_ROW: Final = "| `{}` | {} | {} | {} | {} |\n"
_MUST: Final = "none: must be given"
_TABLE: Final = "| key | value | default | applies | meaning |\n|---|---|---|---|---|\n"


@dataclass(frozen=True, slots=True)
class KeyHelp:
    """One key in words, with Markdown's backticks around what is typed."""

    values: str
    """Allowed values, with their bounds."""
    default: str
    applies: str
    """When a new value takes effect."""
    meaning: str


@cache
def key_help() -> Mapping[str, KeyHelp]:
    """Every key that can be set, in the order of the document."""
    defaults = Policy.model_validate({"version": 1})
    return MappingProxyType(
        {
            name: KeyHelp(
                _values(key.field),
                key.text(defaults),
                AT_START.get(name, "live"),
                " ".join((key.field.description or "").replace("``", "`").split()),
            )
            for name, key in settable_keys().items()
        }
    )


def reference_page() -> str:
    """The whole page, ending in a newline."""
    return "".join(_parts())


def _parts() -> Iterator[str]:
    yield _HEAD
    section = ""
    for key in settable_keys().values():
        top = key.path[0] if len(key.path) > 1 else "top level"
        if top != section:
            yield f"\n## {top}\n\n"
            about = Policy.model_fields[top].description if top in Policy.model_fields else None
            yield f"{_one_line(about)}\n\n" if about else ""
            yield _TABLE
            if not section:
                about = _one_line(Policy.model_fields["version"].description or "")
                yield _ROW.format("version", "1", _MUST, "live", about)
            section = top
        yield _row(key)
    yield f"\n{_SCHEDULES}| key | value | default | meaning |\n|---|---|---|---|\n"
    yield from _fields(Schedule, "")
    yield from _fields(When, "when.")
    yield _EXAMPLE


def _row(key: Key) -> str:
    about = key_help()[key.name]
    meaning = _one_line(about.meaning)
    return _ROW.format(key.name, about.values, f"`{about.default}`", about.applies, meaning)


def _fields(model: type[BaseModel], above: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if field.annotation is When:
            continue
        default = _MUST if field.is_required() else _default(field)
        meaning, key = _one_line(field.description or ""), f"{above}{field.alias or name}"
        yield f"| `{key}` | {_WRITTEN.get(name, 'text')} | {default} | {meaning} |\n"


_WRITTEN: Final = {
    "begin": "time of day",
    "end": "time of day",
    "days": f"list of {', '.join(f'`{day}`' for day in Day)}",
    "pressure": " or ".join(f"`{one}`" for one in Pressure),
    "timezone": "name of a time zone, or `local`",
    "values": "keys with dots, each with a value",
}


def _default(field: FieldInfo) -> str:
    if field.default is None:
        return "none"
    return "every day" if isinstance(field.default, tuple) else f"`{field.default}`"


def _values(field: FieldInfo) -> str:
    """Allowed values: a unit, a choice, or a kind of number, with bounds."""
    kinds = [unit_of(field)] if unit_of(field) else []
    kinds += list(dict.fromkeys(_kinds(field.annotation, bool(kinds))))
    bounds = [
        f"{word} {_bound(field, getattr(one, name))}"
        for one in field.metadata
        for name, word in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))
        if isinstance(getattr(one, name, None), int | float)
    ]
    return " ".join([" or ".join(kinds), *([f"({', '.join(bounds)})"] if bounds else [])])


def _bound(field: FieldInfo, value: float) -> str:
    """In the unit in which values of the field are written, if it has one."""
    match unit_of(field):
        case "time":
            return format_duration(value)
        case "share":
            return format_fraction(value)
        case "size":
            return format_bytes(round(value))
    return f"{value:g}"


def _kinds(annotation: Any, has_unit: bool) -> Iterator[str]:
    plain = {bool: "`true` or `false`", int: "whole number", float: "number", str: "text"}
    if annotation is type(None):
        yield "`null`"
    elif isinstance(annotation, type) and issubclass(annotation, Enum):
        yield from (f"`{one.value}`" for one in annotation)
    elif annotation in plain:
        if not has_unit:
            yield plain[annotation]
    elif get_args(annotation):
        yield from (kind for part in get_args(annotation) for kind in _kinds(part, has_unit))
    elif isinstance(annotation, str):
        yield f"`{annotation}`"


def _one_line(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


SCHEMA_FILE: Final = "policy.schema.json"
_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def policy_json_schema() -> dict[str, Any]:
    """A fresh copy; references in it are to its own ``$defs``."""
    schema = Policy.model_json_schema(by_alias=True)
    definitions: dict[str, Any] = schema["$defs"]
    _alternatives_may_overlap(schema)
    for model in [schema, *definitions.values()]:
        model.pop("title", None)
        for field in model.get("properties", {}).values():
            field.pop("title", None)
            field.pop("default", None)
    defaults = Policy.model_validate({"version": 1})
    values: dict[str, Any] = {}
    for name, key in settable_keys().items():
        field = _field(schema, key)
        values[name] = copy.deepcopy(field)
        written = key.value(defaults)
        field["default"] = key.write(written) if written and unit_of(key.field) else written
    entry = definitions["Schedule"]["properties"]["set"]
    entry.pop("additionalProperties", None)
    entry |= {"properties": values, "additionalProperties": False}
    return {"$schema": _DIALECT, "title": "Policy of a hisparsed node", **schema}


def schema_text() -> str:
    """The schema as the file that is shipped, ending in a newline."""
    return json.dumps(policy_json_schema(), indent=2) + "\n"


def _alternatives_may_overlap(part: Any) -> None:
    """A plain 0 is both a size and a share; in either reading it is right."""
    if isinstance(part, dict):
        if "oneOf" in part:
            part["anyOf"] = part.pop("oneOf")
        part = list(part.values())
    for inner in part if isinstance(part, list) else ():
        _alternatives_may_overlap(inner)


def _field(schema: dict[str, Any], key: Key) -> dict[str, Any]:
    """The schema of one key, in place."""
    found = schema
    for part in key.path:
        if "$ref" in found:
            found = schema["$defs"][found["$ref"].rpartition("/")[2]]
        found = found["properties"][part]
    return found
