"""A route of the control API with its description, and the OpenAPI document made of all of them.

A route is served as soon as it is described, so the two cannot differ. Shapes come from the models
that handlers read and answer with. Also reads queries and bodies. The routes themselves are in
other modules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.json_schema import JsonSchemaMode
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hisparsed.control.api.errors import ERRORS, ApiError, ErrorBody
from hisparsed.policy.problems import printable

Handler = Callable[[Request], Awaitable[Response]]
Method = Literal["GET", "POST"]

JSON: Final = "application/json"


class _Serial(IntegerConvertor):
    """A whole number that SQLite takes; a path with a longer number does not match."""

    regex = "[0-9]{1,18}"


register_url_convertor("serial", _Serial())


class Endpoint(Route):
    """``answer`` is what 200 carries: anything that pydantic can describe.

    ``query`` and ``body`` are the models that the handler reads; ``errors`` are codes of
    ``errors.ERRORS``, without those that every route or every change may answer.
    """

    def __init__(
        self,
        path: str,
        handler: Handler,
        *,
        summary: str,
        answer: Any,
        method: Method = "GET",
        query: type[BaseModel] | None = None,
        body: type[BaseModel] | None = None,
        changes: bool = False,
        errors: tuple[str, ...] = (),
        media_type: str = JSON,
    ) -> None:
        super().__init__(path, handler, methods=[method])
        self.summary = summary
        self.answer = answer
        self.method: Method = method
        self.query = query
        self.body = body
        self.changes = changes
        """Whether the caller must be allowed to change the node."""
        self.errors = errors
        self.media_type = media_type


M = TypeVar("M", bound=BaseModel)

MAX_BODY_BYTES = 2**20
"""Policy documents are the longest bodies, and a thousandth of it."""


def _printable(name: str) -> str:
    return printable(name, lines=False)


class ActorBody(BaseModel):
    """Headers that every change is sent with."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    actor: Annotated[str, AfterValidator(_printable)] = Field(
        min_length=1, max_length=64, pattern=r"^[^\x00-\x1f\x7f]+$"
    )
    """The actor; kept in the journal, with unprintable characters escaped."""


def parse_query(request: Request, model: type[M]) -> M:
    """The query as a model. Raises ``ApiError`` naming the first error."""
    try:
        return model.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise ApiError(400, "bad_query", _first_problem(error)) from None


async def parse_body(request: Request, model: type[M]) -> M:
    """The JSON body as a model. Raises ``ApiError`` naming the first error."""
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > MAX_BODY_BYTES:
            message = f"the body is larger than {MAX_BODY_BYTES >> 20} MiB"
            raise ApiError(413, "too_large", message)
    try:
        return model.model_validate_json(bytes(parts))
    except ValidationError as error:
        raise ApiError(400, "bad_body", _first_problem(error)) from None


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    value = json.dumps(first["input"], default=str)[:60]
    return f"{place}: {first['msg']}, got {value}" if place else f"{first['msg']}, got {value}"


VERSION: Final = "3.1.0"
_REFERENCE: Final = "#/components/schemas/{model}"
_CONVERTER: Final = re.compile(r"\{(\w+):serial\}")
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
            "schema": {"type": "integer", "minimum": 0, "maximum": 10**18 - 1},
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
    """A query has no null: what may be omitted is just not required."""
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
