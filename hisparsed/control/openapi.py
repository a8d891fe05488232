"""The OpenAPI document of the control API, made from its routes.

Shapes come from the models that the handlers read and answer with. Which routes there are is
``api``'s business.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from hisparsed.control.api_endpoint import JSON, Endpoint
from hisparsed.control.api_errors import ERRORS, ErrorBody

VERSION: Final = "3.1.0"
_REFERENCE: Final = "#/components/schemas/{model}"
_CONVERTER: Final = re.compile(r"\{(\w+):int\}")
_ABOUT: Final = (
    "JSON over HTTP on the control socket of one node. Times are seconds, sizes are bytes. "
    "Additions within /v1 are keys and paths; what is there keeps its meaning."
)

Input = tuple[str, JsonSchemaMode]


def openapi_document(endpoints: Sequence[Endpoint], version: str) -> dict[str, Any]:
    """A fresh document; ``version`` is the daemon's."""
    shapes, schemas = _shapes(endpoints)
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        operation = _operation(endpoint, shapes)
        paths.setdefault(_CONVERTER.sub(r"{\1}", endpoint.path), {})[endpoint.method.lower()] = (
            operation
        )
    return {
        "openapi": VERSION,
        "info": {"title": "hisparsed control API", "version": version, "description": _ABOUT},
        "servers": [{"url": "http://node"}],
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _shapes(endpoints: Sequence[Endpoint]) -> tuple[dict[Input, Any], dict[str, Any]]:
    """References by endpoint and direction, and what they refer to."""
    inputs: list[tuple[str, JsonSchemaMode, TypeAdapter[Any]]] = [
        ("", "serialization", TypeAdapter(ErrorBody))
    ]
    for endpoint in endpoints:
        key = _key(endpoint)
        inputs.append((key, "serialization", TypeAdapter(endpoint.answer)))
        if endpoint.body is not None:
            inputs.append((key, "validation", TypeAdapter(endpoint.body)))
        if endpoint.query is not None:
            inputs.append((f"{key}?", "validation", TypeAdapter(endpoint.query)))
    shapes, definitions = TypeAdapter.json_schemas(inputs, ref_template=_REFERENCE)
    return shapes, definitions["$defs"]


def _key(endpoint: Endpoint) -> str:
    return f"{endpoint.method} {endpoint.path}"


def _operation(endpoint: Endpoint, shapes: dict[Input, Any]) -> dict[str, Any]:
    key = _key(endpoint)
    operation: dict[str, Any] = {
        "operationId": _operation_id(endpoint),
        "summary": endpoint.summary,
        "responses": {
            "200": {
                "description": "as asked",
                "content": {endpoint.media_type: {"schema": shapes[key, "serialization"]}},
            },
            **_errors(endpoint, shapes["", "serialization"]),
        },
    }
    parameters = [*_in_path(endpoint), *_in_query(endpoint)]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": shapes[key, "validation"]}},
        }
    return operation


def _operation_id(endpoint: Endpoint) -> str:
    """As a name that client generators take: ``get_policy_schema``."""
    words = re.findall(r"[a-z]+", _CONVERTER.sub(r"\1", endpoint.path.removeprefix("/v1")))
    return "_".join([endpoint.method.lower(), *words])


def _in_path(endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    for name in _CONVERTER.findall(endpoint.path):
        yield {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "integer", "minimum": 0},
        }


def _in_query(endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    if endpoint.query is None:
        return
    for name, schema in _properties(endpoint.query).items():
        parameter: dict[str, Any] = {"name": name, "in": "query", "schema": schema}
        description = schema.pop("description", None)
        if description:
            parameter["description"] = description
        yield parameter


def _properties(model: type[BaseModel]) -> dict[str, Any]:
    """A query has no null: what may be left out is just not required."""
    properties: dict[str, Any] = model.model_json_schema(ref_template=_REFERENCE)["properties"]
    for schema in properties.values():
        schema.pop("title", None)
        alternatives = [one for one in schema.pop("anyOf", ()) if one != {"type": "null"}]
        if alternatives:
            schema.pop("default", None)
            schema.update(alternatives[0])
    return properties


def _errors(endpoint: Endpoint, body: dict[str, Any]) -> dict[str, Any]:
    by_status: dict[int, list[str]] = {}
    for code in _codes(endpoint):
        by_status.setdefault(ERRORS[code].status, []).append(code)
    return {
        str(status): {
            "description": "; ".join(f"`{code}`: {ERRORS[code].meaning}" for code in codes),
            "content": {JSON: {"schema": body, "examples": _examples(codes)}},
        }
        for status, codes in sorted(by_status.items())
    }


def _codes(endpoint: Endpoint) -> Iterable[str]:
    if endpoint.query is not None:
        yield "bad_query"
    if endpoint.body is not None:
        yield from ("bad_body", "too_large")
    if endpoint.changes:
        yield "not_allowed"
    yield from endpoint.errors
    yield "internal"


def _examples(codes: Sequence[str]) -> dict[str, Any]:
    return {
        code: {"value": {"error": {"code": code, "message": ERRORS[code].meaning}}}
        for code in codes
    }
