"""What differs between two policy documents, key by key. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from hisparsed.policy.keys import SCHEDULES, settable_keys
from hisparsed.policy.schema import Policy


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
