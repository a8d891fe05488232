"""The policy in force: document, schedules and the values that operators set.

Everything is checked as a whole and replaced as a whole; an invalid change leaves the last good
policy in force. ``reload`` reads the document; the control loop takes what is in force at its next
tick. ``ClockJump`` detects that the machine's clock was set, so that an override lasts as long as
was asked. Watches no files and records no events.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from hisparsed.control.file_watch import fingerprint, unexpected
from hisparsed.control.state_files import OverrideFile
from hisparsed.errors import UserError
from hisparsed.policy.bounds import (
    engine_multiplier,
    hot_unit,
    lease_blocks,
    min_lease_blocks,
    problems,
    start_multiplier,
)
from hisparsed.policy.document import Loaded, load_document, parse_document
from hisparsed.policy.effective import (
    CheckedPolicy,
    Effective,
    check_policy,
    left_out,
    load_policy,
    pressure_now,
)
from hisparsed.policy.keys import PendingRestart
from hisparsed.policy.problems import ConfigError, Problem, printable
from hisparsed.policy.schedules import Override, Pressure
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import PoolGeometry, Snapshot

LEAST_JUMP_S = 2.0
_LONGEST_READ_S = 0.5


class ClockJump:
    """``clock`` is monotonic seconds, ``wall_clock`` Unix seconds."""

    def __init__(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._apart_s = wall_clock() - clock()

    def since_last_s(self) -> float:
        """Seconds by which the wall clock was set since the last call; 0 if it was not set."""
        before_s = self._clock()
        wall_s = self._wall_clock()
        if self._clock() - before_s > _LONGEST_READ_S:
            return 0.0  # paused between the two readings, which proves nothing
        jump_s = wall_s - before_s - self._apart_s
        self._apart_s += jump_s
        return jump_s if abs(jump_s) >= LEAST_JUMP_S else 0.0


log = logging.getLogger("hisparsed.control")

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class ActivePolicy:
    """The document. ``generation`` rises by one when it, or what operators set, is replaced."""

    value: Policy
    """The document alone: no schedule, nothing that an operator set."""
    generation: int
    content_hash: str
    """SHA-256 of the document, hexadecimal."""
    path: Path
    text: str
    loaded_unix_s: float


class ReloadOutcome(StrEnum):
    LOADED = "loaded"
    UNCHANGED = "unchanged"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Dropped:
    """An override that the policy no longer allows, and why."""

    override: Override
    why: str


@dataclass(frozen=True, slots=True)
class Reload:
    """The result of one reload; ``error`` says why a policy was rejected, with its lines."""

    outcome: ReloadOutcome
    active: ActivePolicy
    error: str | None = None
    dropped: tuple[Dropped, ...] = ()
    left_out: tuple[str, ...] = ()
    """Keys of the document before that this one does not give; they have their defaults."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A document that is not in force: the policy, or what is wrong with it."""

    policy: Policy | None
    problems: tuple[Problem, ...] = ()
    left_out: tuple[str, ...] = ()
    """Keys of the document in force that this one does not give."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """The latest reload was rejected."""

    at_unix_s: float
    error: str
    actor: str


@dataclass(frozen=True, slots=True)
class Advance:
    """Changes by time since the tick before: schedules and overrides that began or ended."""

    expired: tuple[Override, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    began: tuple[str, ...] = ()
    """Schedule entries by name."""
    ended: tuple[str, ...] = ()
    clock_set_s: float = 0.0
    """By how much the machine's clock was set."""


class PolicySource:
    """``clock`` is monotonic seconds, ``wall_clock`` Unix seconds.

    Raises ``ConfigError`` when the first policy is bad.
    """

    def __init__(
        self, path: Path, *, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        self._path = path
        self._wall_clock = wall_clock
        self._jump = ClockJump(clock, wall_clock)
        self._geometry: PoolGeometry | None = None
        self._file: OverrideFile | None = None
        self._pressure = Pressure.LOW
        self._tried = fingerprint(path)
        self._checked = load_policy(path)
        self._active = self._activate(self._checked.loaded, generation=1)
        self._in_force = self._now()
        self._told = self._active_names()
        self.reload_failures = 0
        self.rejection: Rejection | None = None
        """``None`` when the latest reload was not rejected."""

    @property
    def active(self) -> ActivePolicy:
        return self._active

    @property
    def in_force(self) -> Effective:
        """As of the latest ``advance`` or change."""
        return self._in_force

    @property
    def overrides(self) -> tuple[Override, ...]:
        """Values that operators set, in the order in which they were set."""
        return self._checked.overrides

    @property
    def last_error(self) -> str | None:
        return self.rejection.error if self.rejection is not None else None

    @property
    def not_kept(self) -> str | None:
        """Why the values that operators set would not survive a restart; ``None`` if they would."""
        return self._file.error if self._file is not None else None

    @property
    def path(self) -> Path:
        return self._path

    def highest_multiplier(self, decode_query_len: int) -> float:
        """``hot.max`` in top-k, or more where a schedule may ask for more.

        ``decode_query_len``: decode rows of a request in one step, drafts and one more.
        """
        variants = self._checked.variants.values()
        return max(engine_multiplier(policy, decode_query_len) for policy in variants)

    def start_multiplier(self, decode_query_len: int) -> float:
        """``hot.start`` in top-k, within the policy's range; schedules are ignored here."""
        return start_multiplier(self.active.value, decode_query_len)

    def changed_on_disk(self) -> bool:
        """Whether the file changed since the latest reload, valid or not."""
        return fingerprint(self._path) != self._tried

    def pending_restart(self) -> tuple[PendingRestart, ...]:
        """Values of the policy that this engine was not started for."""
        if self._geometry is None:
            return ()
        most = self._geometry.max_lease_blocks * hot_unit(self._geometry)
        if not self._geometry.hot_live:
            return self._pending_start(self._geometry, most)
        variants = self._checked.variants.values()
        # ``auto`` asks for nothing that the engine does not have.
        asked = [one.hot.max for one in variants if not isinstance(one.hot.max, str)]
        wanted = max(asked, default=0.0)
        if wanted <= most + _ROUNDING:
            return ()
        return (PendingRestart("hot.max", f"{most:g}", f"{wanted:g}"),)

    def _pending_start(self, geometry: PoolGeometry, running: float) -> tuple[PendingRestart, ...]:
        """Where every lease has the size that the engine started with, ``running`` top-k."""
        start = self.start_multiplier(geometry.decode_query_len)
        blocks = max(min_lease_blocks(geometry), lease_blocks(geometry, start))
        if blocks == geometry.max_lease_blocks:
            return ()
        wanted = blocks * hot_unit(geometry)
        return (PendingRestart("hot.start", f"{running:g}", f"{wanted:g}"),)

    def bind(self, geometry: PoolGeometry) -> tuple[Dropped, ...]:
        """Set the node's sizes; from now on a policy must be possible on this node.

        Returns the overrides that are not possible. Raises ``UserError`` when the document is not.
        """
        self._geometry = geometry
        try:
            check_policy(self._checked.loaded, (), self._node_problems)
        except ConfigError as error:
            self._geometry = None
            raise UserError(str(error)) from None
        return self._put(self._checked.loaded, self.overrides)

    def restore(self, file: OverrideFile) -> tuple[Dropped, ...]:
        """Load the overrides that ``file`` kept, and keep them there from now on.

        Returns those that are no longer valid. Raises ``OverrideFileError`` when it cannot be read;
        it is then set aside and a new one was created.
        """
        self._file = file
        now_s = self._wall_clock()
        # A clock that was set back while the daemon was down must not make them last longer.
        found = [one.moved(min(0.0, now_s - one.set_unix_s)) for one in file.load()]
        kept = [one for one in found if not one.expired(now_s)]
        return self._put(self._checked.loaded, kept)

    def reload(self, *, actor: str = "daemon") -> Reload:
        """Load the document again; if it has any problem, the policy in force stays."""
        self._tried = fingerprint(self._path)
        try:
            loaded = load_document(self._path, Policy)
            check_policy(loaded, (), self._node_problems)
        except ConfigError as error:
            return self._reject(error.render(), actor)
        except Exception as error:
            log.exception("%s cannot be checked.", self._path)
            return self._reject(f"{self._path}: {unexpected(error)}", actor)
        self.rejection = None
        if loaded.content_hash == self._active.content_hash:
            return Reload(ReloadOutcome.UNCHANGED, self._active)
        self._active = self._activate(loaded, self._active.generation + 1)
        gone = left_out(self._checked.loaded, loaded)
        dropped = self._put(loaded, self.overrides)
        return Reload(ReloadOutcome.LOADED, self._active, dropped=dropped, left_out=gone)

    def _reject(self, why: str, actor: str) -> Reload:
        why = printable(why)
        self.reload_failures += 1
        self.rejection = Rejection(self._wall_clock(), why, actor)
        return Reload(ReloadOutcome.REJECTED, self._active, why)

    def set(self, override: Override) -> None:
        """Put a value above the document, in place of an earlier one for the key.

        Raises ``ConfigError`` when the result is not a valid policy; then nothing changes.
        """
        others = tuple(one for one in self.overrides if one.key != override.key)
        self._checked = check_policy(self._checked.loaded, (*others, override), self._node_problems)
        self._changed()

    def unset(self, key: str) -> tuple[Dropped, ...]:
        """Take a value away; others that are not valid without it go too.

        Raises ``LookupError`` when nothing is set for ``key``.
        """
        others = tuple(one for one in self.overrides if one.key != key)
        if len(others) == len(self.overrides):
            raise LookupError(key)
        return self._put(self._checked.loaded, others, rise=True)

    def advance(self, snapshot: Snapshot | None = None) -> Advance:
        """Let overrides expire and schedules begin and end; called once per tick.

        An override with a time limit lasts as long as requested even if the clock is set; schedules
        follow the clock.
        """
        jump_s = self._jump.since_last_s()
        if jump_s:
            moved = tuple(one.moved(jump_s) for one in self.overrides)
            self._checked = replace(self._checked, overrides=moved)
            self._keep()
        elif self.not_kept is not None:
            self._keep()
        now_s = self._wall_clock()
        expired = tuple(one for one in self.overrides if one.expired(now_s))
        dropped: tuple[Dropped, ...] = ()
        if expired:
            left = [one for one in self.overrides if one not in expired]
            dropped = self._put(self._checked.loaded, left, rise=True)
        if snapshot is not None:
            self._pressure = pressure_now(self._active.value, snapshot, self._pressure)
        if jump_s or self._in_force.active != self._checked.active(now_s, self._pressure):
            self._in_force = self._now()
        # By name, since a value that is set or a reload may have put them in force before.
        before, self._told = self._told, self._active_names()
        return Advance(
            expired,
            dropped,
            tuple(name for name in self._told if name not in before),
            tuple(name for name in before if name not in self._told),
            jump_s,
        )

    def judge(self, text: str) -> Judged:
        """The result that ``reload`` would have with ``text``."""
        try:
            loaded = parse_document(text, str(self._path), Policy)
            policy = check_policy(loaded, (), self._node_problems).loaded.value
        except ConfigError as error:
            return Judged(None, error.problems)
        return Judged(policy, left_out=left_out(self._checked.loaded, loaded))

    def _put(
        self, loaded: Loaded[Policy], overrides: Sequence[Override], *, rise: bool = False
    ) -> tuple[Dropped, ...]:
        """Make the document and as many of the overrides as are valid with it the policy."""
        before = self.overrides
        self._checked, dropped = self._with_valid(loaded, overrides)
        if rise or dropped or self._checked.overrides != before:
            self._changed()
        else:
            self._in_force = self._now()
        return dropped

    def _with_valid(
        self, loaded: Loaded[Policy], overrides: Sequence[Override]
    ) -> tuple[CheckedPolicy, tuple[Dropped, ...]]:
        try:
            return check_policy(loaded, overrides, self._node_problems), ()
        except ConfigError:
            checked = check_policy(loaded, (), self._node_problems)
        valid: list[Override] = []
        dropped: list[Dropped] = []
        for override in overrides:
            try:
                checked = check_policy(loaded, (*valid, override), self._node_problems)
            except ConfigError as error:
                dropped.append(Dropped(override, str(error)))
            else:
                valid.append(override)
        return checked, tuple(dropped)

    def _changed(self) -> None:
        """The overrides have changed: start a new generation and write the file."""
        self._active = ActivePolicy(
            self._active.value,
            self._active.generation + 1,
            self._active.content_hash,
            self._active.path,
            self._active.text,
            self._active.loaded_unix_s,
        )
        self._in_force = self._now()
        self._keep()

    def _keep(self) -> None:
        if self._file is not None:
            self._file.save(self.overrides)

    def _active_names(self) -> tuple[str, ...]:
        schedules = self._active.value.schedules
        return tuple(schedules[index].name for index in self._in_force.active)

    def _now(self) -> Effective:
        return self._checked.effective(self._wall_clock(), self._pressure)

    def _node_problems(self, policy: Policy) -> tuple[str, ...]:
        return problems(policy, self._geometry) if self._geometry is not None else ()

    def _activate(self, loaded: Loaded[Policy], generation: int) -> ActivePolicy:
        return ActivePolicy(
            loaded.value,
            generation,
            loaded.content_hash,
            loaded.path,
            loaded.text,
            self._wall_clock(),
        )
