"""What a feed tells about its node, live or recorded: one type a kind of news."""

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
class StatusNews:
    document: Document


@dataclass(frozen=True, slots=True)
class DecisionNews:
    """Flat decisions in any order; those known already count once."""

    decisions: list[Document]


@dataclass(frozen=True, slots=True)
class EventNews:
    events: list[Document]


@dataclass(frozen=True, slots=True)
class LogNews:
    lines: list[Document]


@dataclass(frozen=True, slots=True)
class PolicyNews:
    document: Document


@dataclass(frozen=True, slots=True)
class HistoryNews:
    document: Document


@dataclass(frozen=True, slots=True)
class RequestNews:
    """``document`` is ``None`` where the node cannot tell, with ``why``."""

    document: Document | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class StartOver:
    """Forget everything: a recorded journal jumped to another time."""


Update = (
    Connected
    | Lost
    | StatusNews
    | DecisionNews
    | EventNews
    | LogNews
    | PolicyNews
    | HistoryNews
    | RequestNews
    | StartOver
)
