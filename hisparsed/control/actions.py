"""What an operator can do to a running node: reload, freeze, thaw, set a mode.

Each action names who did it, and may name the policy generation it was meant for. The next
tick sees the result. Not here: the HTTP around it.
"""

from __future__ import annotations

from collections.abc import Iterable

from hisparsed.control.announce import Announcer
from hisparsed.control.overrides import Overrides
from hisparsed.control.policy_source import PolicySource, Reload, ReloadOutcome
from hisparsed.control.records import EventKind
from hisparsed.policy.reasons import Lever
from hisparsed.policy.schema import Mode


class StaleGenerationError(Exception):
    """The policy is no longer the one that the caller had seen."""


class Operator:
    """One for the API and for signals."""

    def __init__(self, source: PolicySource, overrides: Overrides, announcer: Announcer) -> None:
        self._source = source
        self._overrides = overrides
        self._announcer = announcer

    def reload(self, *, actor: str, expected_generation: int | None = None) -> Reload:
        """Load the policy document; a bad one is rejected and the active one stays."""
        self._check(expected_generation)
        before = self._source.active.generation
        reload = self._source.reload()
        if reload.outcome is ReloadOutcome.REJECTED:
            sentence = (
                f"Rejected the policy that {actor} asked to reload; generation {before} stays "
                f"in force: {reload.error}"
            )
            self._announcer.event(EventKind.POLICY_REJECTED, sentence, actor=actor)
        elif reload.outcome is ReloadOutcome.LOADED:
            active = reload.active
            sentence = (
                f"{actor} reloaded the policy: generation {active.generation} "
                f"({active.content_hash[:12]}) replaces {before} at the next tick."
            )
            self._announcer.event(EventKind.POLICY_LOADED, sentence, actor=actor)
        return reload

    def freeze(
        self, levers: Iterable[Lever], *, actor: str, expected_generation: int | None = None
    ) -> None:
        """Frozen levers stay where they are until thawed."""
        self._check(expected_generation)
        levers = frozenset(levers)
        self._overrides.freeze(levers)
        self._announcer.event(EventKind.FROZEN, f"{actor} froze {_names(levers)}.", actor=actor)

    def thaw(
        self, levers: Iterable[Lever], *, actor: str, expected_generation: int | None = None
    ) -> None:
        self._check(expected_generation)
        levers = frozenset(levers)
        self._overrides.thaw(levers)
        self._announcer.event(EventKind.THAWED, f"{actor} thawed {_names(levers)}.", actor=actor)

    def set_mode(
        self,
        levers: Iterable[Lever],
        mode: Mode | None,
        *,
        actor: str,
        expected_generation: int | None = None,
    ) -> None:
        """``None`` goes back to the document. Raises ``ValueError`` for a less cautious mode."""
        self._check(expected_generation)
        levers = frozenset(levers)
        self._overrides.set_mode(self._source.active.value, levers, mode)
        words = "what the policy document says" if mode is None else mode.value
        sentence = f"{actor} set the mode of {_names(levers)} to {words}."
        self._announcer.event(EventKind.MODE_SET, sentence, actor=actor)

    def _check(self, expected_generation: int | None) -> None:
        current = self._source.active.generation
        if expected_generation is not None and expected_generation != current:
            raise StaleGenerationError(
                f"the policy is at generation {current}, not {expected_generation}; look at it "
                "again and repeat"
            )


def _names(levers: frozenset[Lever]) -> str:
    return ", ".join(lever.value for lever in Lever if lever in levers)
