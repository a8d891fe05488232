"""The policy in force: the document, then schedules, then what operators set, in that order.

Every set of schedule entries that can be active at once is validated whole beforehand, so no clock
can lead to an invalid policy. ``sources_of`` returns where each value comes from, and
``pressure_now`` the pressure for schedules. Pure: time, pressure and overrides come from outside.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hisparsed.policy.document import Loaded, load_document, parse_document, problems_of
from hisparsed.policy.keys import SCHEDULES, settable_keys
from hisparsed.policy.problems import KeyPath, Problem
from hisparsed.policy.reach import live_load, reach_now
from hisparsed.policy.schedules import Active, Override, Pressure, active_entries, combinations
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Snapshot
from hisparsed.policy.yaml_tree import Position, Tree


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


def pressure_now(document: Policy, snapshot: Snapshot, before: Pressure) -> Pressure:
    """High above ``admission.engage_at``, low below ``release_at``, else as before."""
    load = live_load(snapshot, reach_now(snapshot))
    if load > document.admission.engage_at:
        return Pressure.HIGH
    if load < document.admission.release_share:
        return Pressure.LOW
    return before


NodeCheck = Callable[[Policy], Sequence[str]]
"""Reasons why a policy is impossible on a node, as texts that name keys; empty when there are
none."""


def left_out(before: Loaded[Policy], after: Loaded[Policy]) -> tuple[str, ...]:
    """Keys that the document ``before`` gives and ``after`` does not: they have their defaults.

    A document that was cut off in the middle is often valid; these keys reveal it.
    """
    then, now = sources_of(before, (), ()), sources_of(after, (), ())
    return tuple(
        name
        for name, source in then.items()
        if source.origin is Origin.DOCUMENT and now[name].origin is Origin.DEFAULT
    )


@dataclass(frozen=True, slots=True)
class Effective:
    """The values in force at one moment."""

    policy: Policy
    active: Active
    """Indices of the schedule entries in it."""
    sources: Mapping[str, Source]
    """Where the value of each key comes from."""


@dataclass(frozen=True, slots=True)
class CheckedPolicy:
    """A document and overrides, valid together whatever schedules are active."""

    loaded: Loaded[Policy]
    overrides: tuple[Override, ...]
    variants: Mapping[Active, Policy]

    def active(self, unix_s: float, pressure: Pressure) -> Active:
        return active_entries(self.loaded.value.schedules, unix_s, pressure)

    def effective(self, unix_s: float, pressure: Pressure) -> Effective:
        """The policy at Unix time ``unix_s``; local schedules go by this machine's zone."""
        active = self.active(unix_s, pressure)
        sources = sources_of(self.loaded, active, self.overrides)
        return Effective(self.variants[active], active, sources)


def load_policy(path: Path) -> CheckedPolicy:
    """Read the file at ``path`` and check it whole. Raises ``ConfigError``."""
    return check_policy(load_document(path, Policy))


def parse_policy(text: str, name: str) -> CheckedPolicy:
    """Check ``text`` whole; ``name`` is what errors call it. Raises ``ConfigError``."""
    return check_policy(parse_document(text, name, Policy))


def check_policy(
    loaded: Loaded[Policy],
    overrides: Sequence[Override] = (),
    node_check: NodeCheck = lambda _policy: (),
) -> CheckedPolicy:
    """Raises ``ConfigError`` with every problem: of values, of combinations, of the node."""
    problems = list(_unknown_keys(loaded))
    problems += [
        Problem(str(loaded.path), 0, 0, (one.key,), "", *_not_a_key(one.key))
        for one in overrides
        if one.key not in settable_keys()
    ]
    if problems:
        raise loaded.error(*problems)
    variants: dict[Active, Policy] = {}
    failed: list[frozenset[int]] = []
    for active in combinations(loaded.value.schedules):
        if any(smaller <= frozenset(active) for smaller in failed):
            continue
        found = _Variant(loaded, active, overrides)
        policy, wrong = found.build()
        if policy is not None:
            wrong = [found.of_node(text) for text in node_check(policy)]
            variants[active] = policy
        if wrong:
            failed.append(frozenset(active))
            problems += wrong
    if problems:
        raise loaded.error(*dict.fromkeys(problems))
    return CheckedPolicy(loaded, tuple(overrides), variants)


class _Variant:
    """The document with some entries and overrides in it, knowing where each value came from."""

    def __init__(
        self, loaded: Loaded[Policy], active: Active, overrides: Sequence[Override]
    ) -> None:
        self._loaded, self._active = loaded, active
        self._tree = Tree(str(loaded.path), dict(loaded.written), dict(loaded.positions))
        self._changed: dict[KeyPath, KeyPath] = {}
        schedules = loaded.value.schedules
        for index in active:
            for name, value in schedules[index].values.items():
                self._put(name, value, (SCHEDULES, index, "set", name))
        for override in overrides:
            self._put(override.key, override.value, ())
        self._said = " and ".join(f'"{schedules[index].name}"' for index in active)

    def build(self) -> tuple[Policy | None, list[Problem]]:
        if not self._changed:
            return self._loaded.value, []
        try:
            return Policy.model_validate(self._tree.value), []
        except ValidationError as error:
            return None, [self._told(one) for one in problems_of(error, self._tree, Policy)]

    def of_node(self, text: str) -> Problem:
        """The problem that a node's check put in words, at the first key that they name."""
        named = [name for name in settable_keys() if name in text]
        path: KeyPath = min(named, key=text.index).split(".") if named else ()  # type: ignore[assignment]
        place = self._tree.positions.get(tuple(path))
        line, column = (place.line, place.column) if place is not None else (0, 0)
        return self._told(Problem(self._tree.name, line, column, (), "", text), tuple(path))

    def _put(self, name: str, value: Any, source: KeyPath) -> None:
        path = tuple(name.split("."))
        # An override is not in any line.
        place = self._loaded.positions[source] if source else Position(0, 0, 0, 0)
        section = self._tree.value
        for depth, part in enumerate(path[:-1], start=1):
            inner = section.get(part)
            # Only what is changed is copied: the document's own sections stay as they are.
            section[part] = dict(inner) if isinstance(inner, dict) else {}
            section = section[part]
            self._tree.positions.setdefault(path[:depth], place)
        section[path[-1]] = value
        self._tree.positions[path] = place
        self._changed[path] = source

    def _told(self, problem: Problem, path: KeyPath | None = None) -> Problem:
        """The problem at the entry that causes it, naming the active entries."""
        at = problem.key if path is None else path
        said = problem.message
        if self._active:
            said = f"while {self._said} {'are' if len(self._active) > 1 else 'is'} active: {said}"
        if at in self._changed:
            return replace(problem, key=self._changed[at] or at, message=said)
        if not self._active or problem.key in self._loaded.positions:
            return replace(problem, message=said)
        entry: KeyPath = (SCHEDULES, self._active[-1])
        place = self._loaded.positions[entry]
        return replace(problem, line=place.line, column=place.column, message=said)


def _unknown_keys(loaded: Loaded[Policy]) -> Iterator[Problem]:
    for index, entry in enumerate(loaded.value.schedules):
        for name in entry.values:
            if name not in settable_keys():
                place = (SCHEDULES, index, "set", name)
                at = loaded.positions[place]
                words = _not_a_key(name)
                yield Problem(str(loaded.path), at.line, at.column, place, "", *words)


def _not_a_key(name: str) -> tuple[str, str]:
    close = difflib.get_close_matches(name, settable_keys(), n=1) or _named_alike(name)
    if name in (SCHEDULES, "version"):
        return "can only be changed in the document", ""
    below = [known for known in settable_keys() if known.startswith(f"{name}.")]
    if below:
        return "is a section", f"set its keys, such as {below[0]}"
    hint = f"did you mean {close[0]}?" if close else "`hisparsed policy reference` lists all keys"
    return "is not a known key", hint


def _named_alike(name: str) -> list[str]:
    """Keys of another section that have the last word of ``name``."""
    word = name.rpartition(".")[2]
    return [known for known in settable_keys() if word in known.split(".")] if word else []
