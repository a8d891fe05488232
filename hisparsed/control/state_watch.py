"""Tells when something of the state folder cannot be written, once, and when it can again.

Looks at what the writers say of themselves; writes nothing and tries nothing again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hisparsed.control.announce import Announcer
from hisparsed.control.board import TickOutcome
from hisparsed.control.journal import Journal
from hisparsed.control.records import EventKind


class StateWatch:
    """``files`` says of each small file why it cannot be written; ``None`` when it can.

    Call ``watch`` after each tick.
    """

    def __init__(
        self,
        journal: Journal,
        announcer: Announcer,
        files: Mapping[str, Callable[[], str | None]],
    ) -> None:
        self._journal = journal
        self._announcer = announcer
        self._files = files
        self._told: set[str] = set()
        self._set_aside = 0

    def not_kept(self) -> list[str]:
        """Why files other than the journal cannot be written; empty when all can."""
        return [error for look in self._files.values() if (error := look()) is not None]

    def watch(self, _outcome: TickOutcome) -> None:
        health = self._journal.health
        if health.set_aside > self._set_aside:
            self._set_aside = health.set_aside
            self._announcer.event(
                EventKind.JOURNAL_SET_ASIDE,
                f"The journal {self._journal.path} was damaged or of another version; it is kept "
                "beside it and begun anew. Earlier decisions are in the kept file only.",
            )
        error = health.error
        self._tell(
            "the journal",
            None if error is None else f"{self._journal.path} cannot be written: {error}",
            "decisions stay in memory, and those that it has no room for are lost",
        )
        for name, look in self._files.items():
            self._tell(name, look(), "what it holds is in force, but a restart would not know it")

    def _tell(self, name: str, error: str | None, follows: str) -> None:
        if error is not None and name not in self._told:
            self._told.add(name)
            self._announcer.event(
                EventKind.STATE_NOT_KEPT,
                f"{error}. Requests are served on; {follows}. It is tried again.",
            )
        elif error is None and name in self._told:
            self._told.remove(name)
            self._announcer.event(EventKind.STATE_KEPT, f"Written again: {name}.")
