"""The policy in force as one document: its values, and where each of them comes from.

For the control API and for the journal, which keeps it whenever it changes. Reads only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from hisparsed.control.holds import Holds
from hisparsed.control.journal.journal import Journal
from hisparsed.control.journal.records import PolicyRecord, jsonable
from hisparsed.control.live_policy import PolicySource
from hisparsed.control.status.current import schedule_statuses
from hisparsed.policy.effective import Origin, Source
from hisparsed.policy.keys import PendingRestart, settable_keys


def policy_in_force(
    source: PolicySource, holds: Holds, pending: list[PendingRestart]
) -> dict[str, Any]:
    """The answer of `GET /v1/policy`, and what the journal keeps of a policy."""
    active, in_force = source.active, source.in_force
    policy = holds.over(in_force.policy)
    sources = {name: _source(one) for name, one in in_force.sources.items()}
    for lever, actor in holds.mode_actors.items():
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


def _source(source: Source) -> dict[str, Any]:
    found = asdict(source)
    return {"from": found.pop("origin"), **found}


class PolicyJournal:
    """Keeps the policy in the journal: once when it begins, then whenever it changes.

    ``pending`` gives the values that wait for a restart, ``wall_clock`` Unix seconds.
    """

    def __init__(
        self,
        source: PolicySource,
        holds: Holds,
        journal: Journal,
        *,
        pending: Callable[[], list[PendingRestart]],
        wall_clock: Callable[[], float],
    ) -> None:
        self._source = source
        self._holds = holds
        self._journal = journal
        self._pending = pending
        self._wall_clock = wall_clock
        self._kept: object = None

    def look(self) -> None:
        """Called once per tick, before its decision."""
        in_force = self._source.in_force
        mark = (self._source.active.generation, in_force.active, dict(self._holds.modes))
        if mark == self._kept:
            return
        self._kept = mark
        document = policy_in_force(self._source, self._holds, self._pending())
        # The text of the file is on the node; its content is in the values.
        del document["document"]
        record = PolicyRecord(self._wall_clock(), self._source.active.generation, document)
        self._journal.record(record)
