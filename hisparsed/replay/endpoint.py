"""Asks an endpoint what it serves and reads the one counter of its metrics a replay reports.

Errors here are the operator's: wrong address, nothing listening, unknown model.
"""

import re
from dataclasses import dataclass

import httpx

from hisparsed.errors import UserError

_LAST_PORT = 65535
_CONNECT_TIMEOUT_S = 10.0
_METRICS_TIMEOUT_S = 10.0
_PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total(?:\{.*\})? ([0-9.e+]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of the endpoint; `max_model_len` in tokens where it says."""

    name: str
    max_model_len: int | None


def base_url(url: str) -> str:
    """`url` without a trailing slash or /v1; UserError unless it is http(s) with a host."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise _wrong_url(url) from error
    port_fits = parsed.port is None or 0 < parsed.port <= _LAST_PORT
    if parsed.scheme not in ("http", "https") or not parsed.host or not port_fits:
        raise _wrong_url(url)
    return url.rstrip("/").removesuffix("/v1")


def _wrong_url(url: str) -> UserError:
    return UserError(f"--url: {url!r} is not right; need an address such as http://127.0.0.1:8000")


def http_client(
    url: str,
    timeout_s: float,
    api_key: str | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> httpx.AsyncClient:
    """A client for `url` with no limit on connections; `timeout_s` bounds one silence."""
    # With a transport of its own the client ignores proxy variables, which would be measured too.
    return httpx.AsyncClient(
        base_url=base_url(url),
        headers={"authorization": f"Bearer {api_key}"} if api_key else None,
        timeout=httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S, pool=None),
        transport=transport
        or httpx.AsyncHTTPTransport(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None)
        ),
    )


async def served_model(http: httpx.AsyncClient, wanted: str | None) -> ServedModel:
    """The model `wanted`, or the endpoint's first one; UserError says what is there instead."""
    models = await _models(http)
    if wanted is None:
        return models[0]
    for model in models:
        if model.name == wanted:
            return model
    names = ", ".join(model.name for model in models)
    raise UserError(f"--model: {wanted!r} is not served by {http.base_url}; it serves {names}")


async def _models(http: httpx.AsyncClient) -> list[ServedModel]:
    try:
        response = await http.get("/v1/models")
    except httpx.TransportError as error:
        reason = str(error) or type(error).__name__
        raise UserError(
            f"--url: nothing answers at {http.base_url} ({reason}); start a node with "
            "`hisparsed serve --config etc/hisparsed.yaml`, or name another address"
        ) from error
    if response.status_code != httpx.codes.OK:
        raise UserError(
            f"--url: {http.base_url}/v1/models answered {response.status_code}; need the address "
            "of an OpenAI endpoint (and its key in HISPARSED_API_KEY if it asks for one)"
        )
    try:
        cards = response.json()["data"]
        models = [ServedModel(str(card["id"]), card.get("max_model_len")) for card in cards]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--url: {http.base_url}/v1/models is not a list of models") from error
    if not models:
        raise UserError(f"--url: {http.base_url} serves no model; start it with one")
    return models


async def read_preemptions(http: httpx.AsyncClient) -> int | None:
    """The endpoint's count of preempted requests, None where its metrics are not to be had."""
    try:
        response = await http.get("/metrics", timeout=_METRICS_TIMEOUT_S)
    except httpx.TransportError:
        return None
    if response.status_code != httpx.codes.OK:
        return None
    values = _PREEMPTIONS.findall(response.text)
    return round(sum(float(value) for value in values)) if values else None
