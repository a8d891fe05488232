"""The installed vLLM is the one that the snapshots describe, and its live objects agree."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hisparsed.engine.compat.versions import TESTED, installed_vllm
from tests.contract.complaints import is_in
from tests.contract.signature import Signature, parse_signature
from tests.contract.source_tree import SourceTree
from tests.contract.surface import Place, read_surface
from tests.contract.touch import How, Touch
from tests.contract.touched import all_touched

VERSION = installed_vllm() or "none"
CUDA_ONLY = ("vllm._custom_ops", "vllm.v1.hisparse.runtime", "vllm.v1.worker")
"""Modules that need CUDA's libraries when they are imported."""

pytestmark = pytest.mark.skipif(
    VERSION not in TESTED, reason=f"vLLM {VERSION} has no snapshot; {', '.join(TESTED)} have"
)
TABLE = [
    touch
    for touch in all_touched()
    if is_in(VERSION, touch.since, touch.until) and not touch.module.startswith(CUDA_ONLY)
]


def test_its_sources_are_those_of_the_snapshot(
    snapshot: Callable[[str], dict[str, Place]],
) -> None:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None

    # How vLLM calls what we override takes seconds to search for; the wheels' test does that.
    found = read_surface(SourceTree(Path(spec.origin).parent), all_touched(), call_sites=False)

    known = {target: replace(place, call_sites={}) for target, place in snapshot(VERSION).items()}
    differing = [
        target for target in sorted({*found, *known}) if found.get(target) != known.get(target)
    ]
    assert differing == [], "`make snapshots` reads them anew"


@pytest.mark.parametrize("touch", TABLE, ids=lambda touch: touch.target)
def test_live_objects_have_what_the_snapshot_says(
    touch: Touch, snapshot: Callable[[str], dict[str, Place]]
) -> None:
    place = snapshot(VERSION)[touch.target]
    module = import_module(touch.module)
    target = getattr(module, touch.name) if touch.name else module

    assert [problem for problem in _problems(touch, place, target) if problem] == []


def _problems(touch: Touch, place: Place, target: Any) -> list[str | None]:
    problems = [
        _member_problem(use.name, place.members[use.name], target)
        for use in touch.uses
        if use.name in place.members
    ]
    if any(use.how is How.CALLS and not use.name for use in touch.uses):
        problems.append(_signature_problem("itself", place.call or "", target))
    return problems


def _member_problem(name: str, text: str, target: Any) -> str | None:
    text = text.removeprefix("abstract ")
    if text == "attribute":
        return None  # set by a method: no class has it
    if text == "field":
        known = name in getattr(target, "__annotations__", {}) or any(
            name in vars(base).get("__annotations__", {}) for base in getattr(target, "__mro__", ())
        )
        return None if known or hasattr(target, name) else f"{name} is no field"
    if not hasattr(target, name):
        return f"{name} is not there"
    if text.startswith("("):
        return _signature_problem(name, text[1:-1], inspect.getattr_static(target, name))
    return None


def _signature_problem(name: str, text: str, function: Any) -> str | None:
    if isinstance(function, classmethod | staticmethod):
        function = function.__func__
        text = f"cls, {text}" if "cls" in inspect.signature(function).parameters else text
    elif not isinstance(function, type) and "self" in inspect.signature(function).parameters:
        text = f"self, {text}"
    live, read = _live_signature(function), parse_signature(text)
    if isinstance(function, type):
        # Fields may come in another order than from sources, and by keyword that is no matter.
        same = {*live.positional, *live.keyword_only} >= {*read.positional, *read.keyword_only}
        return None if same else f"{name}: {live} instead of ({text})"
    return None if live == read else f"{name}: {live} instead of ({text})"


def _live_signature(function: Any) -> Signature:
    shown: list[str] = []
    for one in inspect.signature(function).parameters.values():
        shown.append(str(one.replace(annotation=one.empty)).partition("=")[0])
        if one.default is not one.empty:
            shown[-1] += "=..."
        if one.kind is one.KEYWORD_ONLY and not any(part.startswith("*") for part in shown):
            shown.insert(-1, "*")
        if one.kind is one.POSITIONAL_ONLY:
            shown = [*(part for part in shown if part != "/"), "/"]
    return parse_signature(", ".join(shown))
