"""The policy document as JSON Schema, for editors and other programs.

Sizes, times and shares are patterns or numbers. What needs two keys at once is checked by the
daemon and by `hisparsed policy check`, not by the schema.
"""

from __future__ import annotations

import copy
import json
from typing import Any, Final

from hisparsed.policy.keys import Key, settable_keys, unit_of
from hisparsed.policy.schema import Policy

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
