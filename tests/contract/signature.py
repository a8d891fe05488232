"""Signatures as short text, and whether a call or another signature fits one.

The text is a Python parameter list without annotations, defaults as ``...``:
"request_id, num_tokens, *, apply_cap=...". ``self`` and ``cls`` are left out.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Signature:
    """Parameter names by how they are given; those in ``optional`` have a default."""

    positional_only: tuple[str, ...]
    positional: tuple[str, ...]
    keyword_only: tuple[str, ...]
    optional: frozenset[str]
    more_positional: bool
    more_keywords: bool

    def refusal(self, positional: int, keywords: Collection[str]) -> str | None:
        """Why a call with so many positional arguments and these keywords fails."""
        by_position = (*self.positional_only, *self.positional)
        if positional > len(by_position) and not self.more_positional:
            return f"takes {len(by_position)} positional arguments, not {positional}"
        given = set(by_position[:positional])
        for keyword in keywords:
            if keyword in given and keyword not in self.positional_only:
                return f"is given {keyword} twice"
            if keyword not in (*self.positional, *self.keyword_only) and not self.more_keywords:
                return f"has no parameter {keyword}"
        given.update(keywords)
        for name in (*by_position, *self.keyword_only):
            if name not in given and name not in self.optional:
                return f"also needs {name}"
        return None

    def narrower(self, other: Signature) -> str | None:
        """What ``other`` takes and this one does not; ``None`` when it takes all of it."""
        theirs = (*other.positional_only, *other.positional)
        ours = (*self.positional_only, *self.positional)
        for place, name in enumerate(theirs):
            if place >= len(ours):
                if not self.more_positional:
                    return f"{name} cannot be given by position"
                if name in other.positional and not self._takes(name):
                    return f"{name} cannot be given by name"
            elif name in other.positional and ours[place] != name:
                return f"its parameter {place + 1} is {ours[place]}, not {name}"
        for name in other.keyword_only:
            if not self._takes(name):
                return f"{name} cannot be given by name"
        if other.more_keywords and not self.more_keywords:
            return "further keywords cannot be given"
        if other.more_positional and not self.more_positional:
            return "further positional arguments cannot be given"
        for name in (*ours, *self.keyword_only):
            given = name in (*theirs, *other.keyword_only)
            if name not in self.optional and (not given or name in other.optional):
                return f"it needs {name}, which may be left out"
        return None

    def _takes(self, name: str) -> bool:
        return name in (*self.positional, *self.keyword_only) or self.more_keywords


def signature_text(arguments: ast.arguments, *, skip_first: bool) -> str:
    """Short text of a function's parameters."""
    by_position = [*arguments.posonlyargs, *arguments.args]
    without = len(by_position) - len(arguments.defaults)
    named = [
        arg.arg if place < without else f"{arg.arg}=..." for place, arg in enumerate(by_position)
    ]
    if arguments.posonlyargs:
        named.insert(len(arguments.posonlyargs), "/")
    if skip_first and named:
        del named[0]
        if named[:1] == ["/"]:
            del named[0]
    if arguments.vararg is not None:
        named.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        named.append("*")
    for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        named.append(arg.arg if default is None else f"{arg.arg}=...")
    if arguments.kwarg is not None:
        named.append(f"**{arguments.kwarg.arg}")
    return ", ".join(named)


def parse_signature(text: str) -> Signature:
    """Raises ``SyntaxError`` for text that is no parameter list."""
    function = ast.parse(f"def f({text}): ...").body[0]
    if not isinstance(function, ast.FunctionDef):
        raise SyntaxError(f"{text!r} is not a parameter list")
    arguments = function.args
    by_position = [*arguments.posonlyargs, *arguments.args]
    optional = {arg.arg for arg in by_position[len(by_position) - len(arguments.defaults) :]}
    optional.update(
        arg.arg
        for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is not None
    )
    return Signature(
        tuple(arg.arg for arg in arguments.posonlyargs),
        tuple(arg.arg for arg in arguments.args),
        tuple(arg.arg for arg in arguments.kwonlyargs),
        frozenset(optional),
        arguments.vararg is not None,
        arguments.kwarg is not None,
    )
