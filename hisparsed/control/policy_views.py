"""The policy in force as the API shows it: values, where each comes from, and what waits. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hisparsed.control.overrides import Overrides
from hisparsed.control.policy_source import PolicySource
from hisparsed.control.records import jsonable
from hisparsed.control.status import ScheduleStatus
from hisparsed.policy.compare import changes
from hisparsed.policy.keys import settable_keys
from hisparsed.policy.problems import key_text
from hisparsed.policy.restart import PendingRestart
from hisparsed.policy.sources import Origin, Source


def schedule_statuses(source: PolicySource) -> list[ScheduleStatus]:
    active = source.in_force.active
    return [
        ScheduleStatus(name=entry.name, active=index in active)
        for index, entry in enumerate(source.active.value.schedules)
    ]


def policy_document(
    source: PolicySource, overrides: Overrides, pending: list[PendingRestart]
) -> dict[str, Any]:
    """The answer of `GET /v1/policy`."""
    active, in_force = source.active, source.in_force
    policy = overrides.over(in_force.policy)
    sources = {name: _source(one) for name, one in in_force.sources.items()}
    for lever, actor in overrides.mode_actors.items():
        sources[f"levers.{lever}.mode"] = _source(Source(Origin.OVERRIDE, actor=actor))
    rejection = source.rejection
    return {
        "generation": active.generation,
        "content_hash": active.content_hash,
        "file": str(active.path),
        "path": str(active.path),
        "loaded_unix_s": active.loaded_unix_s,
        "document": active.text,
        "value": jsonable(policy),
        "values": {name: key.text(policy) for name, key in settable_keys().items()},
        "sources": sources,
        "overrides": [asdict(one) for one in source.overrides],
        "schedules": [one.model_dump() for one in schedule_statuses(source)],
        "pending_restart": [asdict(one) for one in pending],
        "rejected": asdict(rejection) if rejection is not None else None,
        "last_error": source.last_error,
    }


def judgement(source: PolicySource, text: str) -> dict[str, Any]:
    """The answer of `POST /v1/policy/check` and `/v1/policy/diff`."""
    policy, problems = source.judge(text)
    return {
        "ok": policy is not None,
        "problems": [
            {
                "line": one.line,
                "key": key_text(one.key),
                "message": one.words,
            }
            for one in problems
        ],
        "changes": []
        if policy is None
        else [asdict(one) for one in changes(source.active.value, policy)],
    }


def _source(source: Source) -> dict[str, Any]:
    found = asdict(source)
    return {"from": found.pop("origin"), **found}
