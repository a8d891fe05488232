"""Updates of a node from a feed, live or recorded: one type per kind."""

from __future__ import annotations

from dataclasses import dataclass

from hisparsed.tui.wire import Document


@dataclass(frozen=True, slots=True)
class Connected:
    """The stream is open."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The node does not answer, or not yet; ``why`` is for people."""

    why: str


@dataclass(frozen=True, slots=True)
class StatusUpdate:
    document: Document


@dataclass(frozen=True, slots=True)
class DecisionUpdate:
    """Flat decisions in any order; known ones are not repeated."""

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
    """``document`` is ``None`` if the node has none, with ``why``."""

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
