"""How a vLLM name that hisparsed touches is written down.

A ``Touch`` is one class, function or module of vLLM and what we do with it. ``touched/`` holds
them, one module a part of ours; the contract tests hold them against every version of vLLM.
Knows no vLLM: names are text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class How(StrEnum):
    """What we do with a member; decides what the contract tests demand of it."""

    READS = "reads"
    """An attribute, property or field is there."""
    SETS = "sets"
    """The same, and it is not a property without a setter."""
    CALLS = "calls"
    """A method or function takes the arguments that we pass."""
    OVERRIDES = "overrides"
    """A method is there, and ours takes whatever vLLM's own takes."""
    IMPLEMENTS = "implements"
    """A method is there that vLLM calls on an object of ours; ours takes what vLLM passes."""
    MEMBER = "member"
    """An enum has it."""
    FIELD = "field"
    """A constructor, dataclass or model takes a keyword of this name."""
    TEXT = "text"
    """The source has this string literal: a key, an environment variable, a metric, a method name
    that is looked up by name."""


@dataclass(frozen=True, slots=True)
class Use:
    """One member. ``name`` is empty where it is the touched function or class itself.

    ``positional`` and ``keywords`` are the arguments of our call, without ``self``. ``since`` and
    ``until`` are the first and last vLLM ("0.33") that have it, where not all do; then
    ``adapter`` names the module of ``compat`` that makes the difference disappear.
    """

    how: How
    name: str = ""
    positional: int = 0
    keywords: tuple[str, ...] = ()
    since: str | None = None
    until: str | None = None
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Touch:
    """``target``: "vllm.module:Class", "vllm.module:function" or "vllm.module".

    ``by``: our modules, without "hisparsed.". ``ours``: our classes under it, as "module:Class",
    where we derive from it or set it as the class of live objects. ``breaks`` says what an
    operator would see if the name moved.
    """

    target: str
    by: tuple[str, ...]
    why: str
    breaks: str
    uses: tuple[Use, ...] = ()
    ours: tuple[str, ...] = ()
    since: str | None = None
    until: str | None = None
    adapter: str | None = None

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def name(self) -> str:
        """The class or function; empty for a module."""
        return self.target.partition(":")[2]


def reads(*names: str) -> tuple[Use, ...]:
    return tuple(Use(How.READS, name) for name in names)


def sets(*names: str) -> tuple[Use, ...]:
    return tuple(Use(How.SETS, name) for name in names)


def overrides(*names: str) -> tuple[Use, ...]:
    return tuple(Use(How.OVERRIDES, name) for name in names)


def only(
    uses: tuple[Use, ...], adapter: str, *, since: str | None = None, until: str | None = None
) -> tuple[Use, ...]:
    """``uses`` that not every version has; ``adapter`` is a module of ours without "hisparsed."."""
    return tuple(replace(use, since=since, until=until, adapter=adapter) for use in uses)


def implements(*names: str) -> tuple[Use, ...]:
    return tuple(Use(How.IMPLEMENTS, name) for name in names)


def members(*names: str) -> tuple[Use, ...]:
    return tuple(Use(How.MEMBER, name) for name in names)


def fields(*names: str) -> tuple[Use, ...]:
    return tuple(Use(How.FIELD, name) for name in names)


def texts(*literals: str) -> tuple[Use, ...]:
    return tuple(Use(How.TEXT, literal) for literal in literals)


def calls(
    name: str = "",
    positional: int = 0,
    *keywords: str,
    since: str | None = None,
    until: str | None = None,
    adapter: str | None = None,
) -> tuple[Use, ...]:
    """One call as we make it; without ``name`` the touched function or class is called."""
    return (Use(How.CALLS, name, positional, keywords, since, until, adapter),)
