"""Updates of a node that a feed brings, live or recorded: one type a kind."""

from __future__ import annotations

from dataclasses import dataclass

from hisparsed.tui.wire import Document


@dataclass(frozen=True, slots=True)
class Connected:
    """The stream is open."""


@dataclass(frozen=True, slots=True)
class Lost:
    """No answer any more, or not yet; ``why`` is for people."""

    why: str


@dataclass(frozen=True, slots=True)
class StatusUpdate:
    document: Document


@dataclass(frozen=True, slots=True)
class DecisionUpdate:
    """Flat decisions in any order; those known already count once."""

    decisions: list[Document]


@dataclass(frozen=True, slots=True)
class EventUpdate:
    events: list[Document]


@dataclass(frozen=True, slots=True)
class LogUpdate:
    lines: list[Document]


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    document: Document


@dataclass(frozen=True, slots=True)
class KeyUpdate:
    """The meaning of every key of the policy."""

    document: Document


@dataclass(frozen=True, slots=True)
class HistoryUpdate:
    document: Document


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """``document`` is ``None`` where the node does not know, with ``why``."""

    document: Document | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class StartOver:
    """Forget everything: a recorded journal jumped to another time."""


Update = (
    Connected
    | Lost
    | StatusUpdate
    | DecisionUpdate
    | EventUpdate
    | LogUpdate
    | PolicyUpdate
    | KeyUpdate
    | HistoryUpdate
    | RequestUpdate
    | StartOver
)
