"""Routes of the policy: what is in force and why, what a document would change, and changes.

Changes go through ``Operator`` only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hisparsed.control.api.answers import (
    Changed,
    Judgement,
    PolicyInForce,
    PolicyKeys,
    Reloaded,
    ValueSet,
)
from hisparsed.control.api.endpoint import ActorBody, Endpoint, Handler, parse_body
from hisparsed.control.api.errors import ApiError
from hisparsed.control.api.socket import recorded_actor
from hisparsed.control.live_policy import PolicySource, ReloadOutcome
from hisparsed.control.operator import Operator
from hisparsed.control.policy_in_force import policy_in_force
from hisparsed.control.status.current import CurrentStatus
from hisparsed.policy.keys import changes
from hisparsed.policy.problems import ConfigError, key_text, refuse
from hisparsed.policy.schedules import LONGEST_S, SetValue
from hisparsed.policy.schema import Mode
from hisparsed.policy.schema_docs import key_help, policy_json_schema
from hisparsed.policy.signals import Lever
from hisparsed.policy.units import format_duration


def judgement(source: PolicySource, text: str) -> dict[str, Any]:
    """The answer of `POST /v1/policy/check` and `/v1/policy/diff`."""
    judged = source.judge(text)
    policy = judged.policy
    return {
        "ok": policy is not None,
        "problems": [
            {
                "line": one.line,
                "key": key_text(one.key),
                "message": one.words,
            }
            for one in judged.problems
        ],
        "changes": []
        if policy is None
        else [asdict(one) for one in changes(source.active.value, policy)],
        "left_out": judged.left_out,
    }


def _span(seconds: float | None) -> float | None:
    if seconds is not None and not 0 < seconds <= LONGEST_S:
        message = (
            f"must be more than 0 and at most {LONGEST_S:.0f} seconds "
            f"({format_duration(LONGEST_S)}); null lasts until it is unset"
        )
        raise refuse("span", message)
    return seconds


_SPAN_SCHEMA = {
    "anyOf": [
        {"type": "number", "exclusiveMinimum": 0, "maximum": LONGEST_S},
        {"type": "null"},
    ]
}
_VALUE_SCHEMA = {"type": ["boolean", "number", "string", "null"]}


class _Body(ActorBody):
    expected_generation: int | None = None
    """The policy generation that the change was meant for; nothing changes in another one."""


class _LeverBody(_Body):
    levers: tuple[Lever, ...] = Field(default=tuple(Lever), min_length=1)
    """All of them when omitted."""


class _ModeBody(_LeverBody):
    mode: Mode | None
    """`null` goes back to the policy document's."""


class _SetBody(_Body):
    key: str
    """With dots, such as `hot.max`."""
    value: Annotated[SetValue, WithJsonSchema(_VALUE_SCHEMA)]
    """Text is read as the policy document would read it."""
    for_s: Annotated[float | None, AfterValidator(_span), WithJsonSchema(_SPAN_SCHEMA)]
    """Seconds; `null` lasts until it is unset, and must be given."""


class _UnsetBody(_Body):
    key: str


class _DocumentBody(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    document: str
    """A policy document as a file would have it."""


@dataclass(frozen=True, slots=True)
class PolicyApi:
    """The handlers; ``routes`` names their paths."""

    current: CurrentStatus
    operator: Operator
    source: PolicySource

    def routes(self) -> list[Route]:
        return [
            Endpoint(
                "/v1/policy",
                self.policy,
                summary="The policy in force, and where each value comes from.",
                answer=PolicyInForce,
            ),
            Endpoint(
                "/v1/policy/schema",
                self.schema,
                summary="JSON Schema of the policy document.",
                answer=dict[str, Any],
            ),
            Endpoint(
                "/v1/policy/keys",
                self.keys,
                summary="Every key of the policy document: values, default, meaning.",
                answer=PolicyKeys,
            ),
            *(
                Endpoint(
                    f"/v1/policy/{word}",
                    self.judge,
                    method="POST",
                    summary=f"What {what}. Changes nothing.",
                    body=_DocumentBody,
                    answer=Judgement,
                )
                for word, what in (
                    ("check", "is wrong with a document"),
                    ("diff", "a document would change"),
                )
            ),
            self._change(
                "/v1/policy/reload",
                self.reload,
                summary="Read the policy document again; the response follows the check.",
                body=_Body,
                answer=Reloaded,
                errors=("policy_rejected",),
            ),
            self._change(
                "/v1/policy/set",
                self.set_value,
                summary="Override a value of document and schedules for a time.",
                body=_SetBody,
                answer=ValueSet,
                errors=("value_refused",),
            ),
            self._change(
                "/v1/policy/unset",
                self.unset_value,
                summary="Remove an override.",
                body=_UnsetBody,
                errors=("not_set",),
            ),
            self._change(
                "/v1/freeze",
                self.freeze,
                summary="Levers stay where they are until they are thawed.",
                body=_LeverBody,
            ),
            self._change("/v1/thaw", self.thaw, summary="Levers may move again.", body=_LeverBody),
            self._change(
                "/v1/mode",
                self.mode,
                summary="A more cautious mode for some levers than the document's.",
                body=_ModeBody,
                errors=("mode_refused",),
            ),
        ]

    @staticmethod
    def _change(
        path: str,
        handler: Handler,
        *,
        summary: str,
        body: type[BaseModel],
        answer: type[BaseModel] = Changed,
        errors: tuple[str, ...] = (),
    ) -> Endpoint:
        return Endpoint(
            path,
            handler,
            method="POST",
            summary=summary,
            body=body,
            answer=answer,
            changes=True,
            errors=("stale_generation", *errors),
        )

    async def policy(self, request: Request) -> Response:
        pending = self.current.pending_restart()
        return JSONResponse(policy_in_force(self.source, self.operator.holds, pending))

    async def schema(self, request: Request) -> Response:
        return JSONResponse(policy_json_schema())

    async def keys(self, request: Request) -> Response:
        return JSONResponse({"keys": {name: asdict(one) for name, one in key_help().items()}})

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
        pending = [asdict(one) for one in self.current.pending_restart()]
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
            modes = {f"levers.{lever}.mode" for lever in self.operator.holds.modes}
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
        policy = self.current.status().policy
        return {
            "generation": policy.generation,
            "content_hash": policy.content_hash,
            "frozen": policy.frozen,
            "overridden": policy.overridden,
            "not_kept": self.source.not_kept,
        }


def _words(error: ConfigError) -> str:
    """The problem; with the place if it is in the document."""
    return "\n".join(
        str(one) if one.line else f"{key_text(one.key)}: {one.words}" for one in error.problems
    )
