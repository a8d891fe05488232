"""Where each value of the policy in force comes from: default, document, schedule or operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hisparsed.policy.document import Loaded
from hisparsed.policy.keys import SCHEDULES, settable_keys
from hisparsed.policy.override import Override
from hisparsed.policy.schedules import Active
from hisparsed.policy.schema import Policy


class Origin(StrEnum):
    """The later ones win."""

    DEFAULT = "default"
    DOCUMENT = "document"
    SCHEDULE = "schedule"
    OVERRIDE = "override"


@dataclass(frozen=True, slots=True)
class Source:
    """What does not apply to an origin is ``None``; ``line`` is of the document."""

    origin: Origin
    line: int | None = None
    schedule: str | None = None
    actor: str | None = None
    expires_unix_s: float | None = None


def sources_of(
    loaded: Loaded[Policy], active: Active, overrides: Sequence[Override]
) -> Mapping[str, Source]:
    """A source for every key, in the document's order."""
    found: dict[str, Source] = {}
    for name, key in settable_keys().items():
        place = loaded.positions.get(key.path)
        found[name] = (
            Source(Origin.DEFAULT) if place is None else Source(Origin.DOCUMENT, place.line)
        )
    for index in active:
        entry = loaded.value.schedules[index]
        for name in entry.values:
            line = loaded.positions[SCHEDULES, index, "set", name].line
            found[name] = Source(Origin.SCHEDULE, line, schedule=entry.name)
    for override in overrides:
        found[override.key] = Source(
            Origin.OVERRIDE, actor=override.actor, expires_unix_s=override.expires_unix_s
        )
    return found
