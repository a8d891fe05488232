"""The actions of an operator on a running node: reload, set values, freeze, thaw, set a mode.

Each action names its actor and may name the policy generation it is meant for. It takes effect at
the next tick. The events that an action, a schedule or an expiry causes are recorded here too.
``api.policy`` has the HTTP routes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from hisparsed.control.events import DAEMON, EventRecorder
from hisparsed.control.holds import Holds
from hisparsed.control.live_policy import Advance, Dropped, PolicySource, Reload, ReloadOutcome
from hisparsed.control.state_files import OverrideFile, OverrideFileError
from hisparsed.control.text.policy import left_out_text
from hisparsed.control.text.status import value_text
from hisparsed.policy.events import EventKind
from hisparsed.policy.schedules import Override, Scalar
from hisparsed.policy.schema import Mode
from hisparsed.policy.signals import Lever
from hisparsed.policy.units import format_duration
from hisparsed.policy.yaml_tree import read_scalar


def record_dropped(recorder: EventRecorder, dropped: Iterable[Dropped]) -> None:
    """The overrides that the policy no longer allows, each with the reason."""
    for one in dropped:
        override = one.override
        recorder.event(
            EventKind.VALUE_DROPPED,
            f"Dropped {override.key} = {value_text(override.value)}, set by {override.actor}: "
            f"it is no longer valid. {one.why}",
        )


def restore_overrides(source: PolicySource, recorder: EventRecorder, folder: Path) -> None:
    """Load the values that operators had set before a restart; those that are impossible are
    reported."""
    try:
        record_dropped(recorder, source.restore(OverrideFile(folder)))
    except OverrideFileError as error:
        recorder.event(EventKind.VALUE_DROPPED, f"Values set by operators are lost: {error}.")


def record_advance(recorder: EventRecorder, advance: Advance) -> None:
    if advance.clock_set_s:
        way = "forward" if advance.clock_set_s > 0 else "back"
        by = format_duration(float(round(abs(advance.clock_set_s))))
        recorder.event(
            EventKind.CLOCK_SET,
            f"The machine's clock was set {way} by {by}. Schedules use the new time; values that "
            f"were set for a time last as long as requested.",
        )
    for override in advance.expired:
        recorder.event(
            EventKind.VALUE_EXPIRED,
            f"The time of {override.key} = {value_text(override.value)}, set by {override.actor}, "
            "has ended; the value of the policy applies again.",
        )
    record_dropped(recorder, advance.dropped)
    for kind, names, words in (
        (EventKind.SCHEDULE_ENDED, advance.ended, "ended"),
        (EventKind.SCHEDULE_BEGAN, advance.began, "began"),
    ):
        for name in names:
            recorder.event(kind, f'The schedule "{name}" {words}.', actor=DAEMON)


FILE_WATCH = "file watch"
"""The actor of reloads without a request: the document has changed on disk."""


class StaleGenerationError(Exception):
    """The policy has changed since the caller saw it."""


class Operator:
    """One for the API and for signals. ``wall_clock`` is Unix seconds."""

    def __init__(
        self,
        source: PolicySource,
        holds: Holds,
        recorder: EventRecorder,
        *,
        wall_clock: Callable[[], float],
    ) -> None:
        self._source = source
        self._wall_clock = wall_clock
        self._holds = holds
        self._recorder = recorder

    @property
    def holds(self) -> Holds:
        return self._holds

    def reload(self, *, actor: str, expected_generation: int | None = None) -> Reload:
        """Load the policy document; an invalid one is rejected and the active one stays."""
        self._check(expected_generation)
        before, was_bad = self._source.active.generation, self._source.rejection is not None
        reload = self._source.reload(actor=actor)
        if reload.outcome is ReloadOutcome.REJECTED:
            sentence = (
                f"Rejected the policy that {actor} asked to reload; generation {before} stays "
                f"in force: {reload.error}"
            )
            self._recorder.event(EventKind.POLICY_REJECTED, sentence, actor=actor)
        elif reload.outcome is ReloadOutcome.LOADED:
            active = reload.active
            sentence = (
                f"{actor} reloaded the policy: generation {active.generation} "
                f"({active.content_hash[:12]}) replaces {before} at the next tick."
            )
            if reload.left_out:
                sentence += f" {left_out_text(reload.left_out)}"
            self._recorder.event(EventKind.POLICY_LOADED, sentence, actor=actor)
            record_dropped(self._recorder, reload.dropped)
        elif was_bad:
            sentence = f"The policy document is generation {before} again, which is in force."
            self._recorder.event(EventKind.POLICY_LOADED, sentence, actor=actor)
        return reload

    def reload_if_changed(self) -> None:
        """Reload if the file changed since the latest reload, regardless of who asked for that."""
        if self._source.changed_on_disk():
            self.reload(actor=FILE_WATCH)

    def set_value(
        self,
        key: str,
        value: Scalar,
        *,
        for_s: float | None,
        actor: str,
        expected_generation: int | None = None,
    ) -> Override:
        """Put a value above the document for ``for_s`` seconds, or until unset when ``None``.

        Text is read as the document would read it. Raises ``ConfigError`` when the result is not a
        valid policy; then nothing changes.
        """
        self._check(expected_generation)
        now_s = self._wall_clock()
        override = Override(
            key=key,
            value=read_scalar(value) if isinstance(value, str) else value,
            actor=actor,
            set_unix_s=now_s,
            expires_unix_s=None if for_s is None else now_s + for_s,
        )
        self._source.set(override)
        words = "until it is unset" if for_s is None else f"for {format_duration(for_s)}"
        sentence = f"{actor} set {key} = {value_text(override.value)} {words}."
        if self._source.not_kept is not None:
            sentence += f" It will not survive a restart: {self._source.not_kept}."
        self._recorder.event(EventKind.VALUE_SET, sentence, actor=actor)
        return override

    def unset_value(self, key: str, *, actor: str, expected_generation: int | None = None) -> None:
        """End the override of ``key``. Raises ``LookupError`` when there is none."""
        self._check(expected_generation)
        dropped = self._source.unset(key)
        self._recorder.event(EventKind.VALUE_UNSET, f"{actor} unset {key}.", actor=actor)
        record_dropped(self._recorder, dropped)

    def freeze(
        self, levers: Iterable[Lever], *, actor: str, expected_generation: int | None = None
    ) -> None:
        """Frozen levers are frozen until thawed."""
        self._check(expected_generation)
        levers = frozenset(levers)
        self._holds.freeze(levers)
        self._recorder.event(EventKind.FROZEN, f"{actor} froze {_names(levers)}.", actor=actor)

    def thaw(
        self, levers: Iterable[Lever], *, actor: str, expected_generation: int | None = None
    ) -> None:
        self._check(expected_generation)
        levers = frozenset(levers)
        self._holds.thaw(levers)
        self._recorder.event(EventKind.THAWED, f"{actor} thawed {_names(levers)}.", actor=actor)

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
        self._holds.set_mode(self._source.in_force.policy, levers, mode, actor=actor)
        words = "the policy document's" if mode is None else mode.value
        sentence = f"{actor} set the mode of {_names(levers)} to {words}."
        self._recorder.event(EventKind.MODE_SET, sentence, actor=actor)

    def _check(self, expected_generation: int | None) -> None:
        current = self._source.active.generation
        if expected_generation is not None and expected_generation != current:
            raise StaleGenerationError(
                f"the policy is at generation {current}, not {expected_generation}; look at it "
                "again and repeat"
            )


def _names(levers: frozenset[Lever]) -> str:
    return ", ".join(lever.value for lever in Lever if lever in levers)
