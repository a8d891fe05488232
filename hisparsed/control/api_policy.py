"""The routes about the policy: what is in force and why, what a document would do, and changes.

Changes go through ``Operator`` only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hisparsed.control.actions import Operator
from hisparsed.control.api_base import ActorBody, ApiError, parse_body
from hisparsed.control.board import Board
from hisparsed.control.peer import recorded_actor
from hisparsed.control.policy_source import PolicySource, ReloadOutcome
from hisparsed.control.policy_views import judgement, policy_document
from hisparsed.policy.document import ConfigError
from hisparsed.policy.json_schema import policy_json_schema
from hisparsed.policy.override import LONGEST_S
from hisparsed.policy.problems import key_text, refuse
from hisparsed.policy.reasons import Lever
from hisparsed.policy.schedules import SetValue
from hisparsed.policy.schema import Mode
from hisparsed.policy.units import format_duration


def _span(seconds: float | None) -> float | None:
    if seconds is not None and not 0 < seconds <= LONGEST_S:
        message = (
            f"must be more than 0 and at most {LONGEST_S:.0f} seconds "
            f"({format_duration(LONGEST_S)}); null lasts until it is unset"
        )
        raise refuse("span", message)
    return seconds


class _Body(ActorBody):
    expected_generation: int | None = None


class _LeverBody(_Body):
    levers: tuple[Lever, ...] = Field(default=tuple(Lever), min_length=1)
    """All of them when left out."""


class _ModeBody(_LeverBody):
    mode: Mode | None
    """``null`` goes back to what the policy document says."""


class _SetBody(_Body):
    key: str
    value: SetValue
    """Text is read as the policy document would read it."""
    for_s: Annotated[float | None, AfterValidator(_span)]
    """Seconds; ``null`` lasts until it is unset, and must be said."""


class _UnsetBody(_Body):
    key: str


class _DocumentBody(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    document: str


@dataclass(frozen=True, slots=True)
class PolicyApi:
    """The handlers; ``routes`` names their paths."""

    board: Board
    operator: Operator
    source: PolicySource

    def routes(self) -> list[Route]:
        changing = {
            "/v1/policy/reload": self.reload,
            "/v1/policy/set": self.set_value,
            "/v1/policy/unset": self.unset_value,
            "/v1/policy/check": self.judge,
            "/v1/policy/diff": self.judge,
            "/v1/freeze": self.freeze,
            "/v1/thaw": self.thaw,
            "/v1/mode": self.mode,
        }
        return [
            Route("/v1/policy", self.policy),
            Route("/v1/policy/schema", self.schema),
            *(Route(path, handler, methods=["POST"]) for path, handler in changing.items()),
        ]

    async def policy(self, request: Request) -> Response:
        pending = self.board.pending_restart()
        return JSONResponse(policy_document(self.source, self.operator.overrides, pending))

    async def schema(self, request: Request) -> Response:
        return JSONResponse(policy_json_schema())

    async def judge(self, request: Request) -> Response:
        body = await parse_body(request, _DocumentBody)
        return JSONResponse(judgement(self.source, body.document))

    async def reload(self, request: Request) -> Response:
        body = await parse_body(request, _Body)
        reload = self.operator.reload(
            actor=recorded_actor(request.scope, body.actor),
            expected_generation=body.expected_generation,
        )
        if reload.outcome is ReloadOutcome.REJECTED:
            raise ApiError(422, "policy_rejected", reload.error or "")
        return JSONResponse({"outcome": reload.outcome, **self._summary()})

    async def set_value(self, request: Request) -> Response:
        body = await parse_body(request, _SetBody)
        try:
            override = self.operator.set_value(
                body.key,
                body.value,
                for_s=body.for_s,
                actor=recorded_actor(request.scope, body.actor),
                expected_generation=body.expected_generation,
            )
        except ConfigError as error:
            raise ApiError(422, "value_refused", _words(error)) from None
        pending = [asdict(one) for one in self.board.pending_restart()]
        answer = {"override": asdict(override), "pending_restart": pending}
        return JSONResponse({**answer, **self._summary()})

    async def unset_value(self, request: Request) -> Response:
        body = await parse_body(request, _UnsetBody)
        try:
            self.operator.unset_value(
                body.key,
                actor=recorded_actor(request.scope, body.actor),
                expected_generation=body.expected_generation,
            )
        except LookupError:
            held = ", ".join(one.key for one in self.source.overrides) or "nothing"
            message = f"no operator has set {body.key}; set now: {held}"
            modes = {f"levers.{lever}.mode" for lever in self.operator.overrides.modes}
            if body.key in modes:
                message += "; `hisparsed mode policy` sets the mode of a lever back"
            raise ApiError(422, "not_set", message) from None
        return JSONResponse(self._summary())

    async def freeze(self, request: Request) -> Response:
        body = await parse_body(request, _LeverBody)
        self.operator.freeze(
            body.levers,
            actor=recorded_actor(request.scope, body.actor),
            expected_generation=body.expected_generation,
        )
        return JSONResponse(self._summary())

    async def thaw(self, request: Request) -> Response:
        body = await parse_body(request, _LeverBody)
        self.operator.thaw(
            body.levers,
            actor=recorded_actor(request.scope, body.actor),
            expected_generation=body.expected_generation,
        )
        return JSONResponse(self._summary())

    async def mode(self, request: Request) -> Response:
        body = await parse_body(request, _ModeBody)
        try:
            self.operator.set_mode(
                body.levers,
                body.mode,
                actor=recorded_actor(request.scope, body.actor),
                expected_generation=body.expected_generation,
            )
        except ValueError as error:
            raise ApiError(422, "mode_refused", str(error)) from None
        return JSONResponse(self._summary())

    def _summary(self) -> dict[str, Any]:
        policy = self.board.status().policy
        return {
            "generation": policy.generation,
            "content_hash": policy.content_hash,
            "frozen": policy.frozen,
            "overridden": policy.overridden,
            "not_kept": self.source.not_kept,
        }


def _words(error: ConfigError) -> str:
    """What is wrong; the place only where it is in the document."""
    return "\n".join(
        str(one) if one.line else f"{key_text(one.key)}: {one.words}" for one in error.problems
    )
