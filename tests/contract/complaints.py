"""Holds the table against one version of vLLM: what of it does not fit, in sentences.

Pure: works on a surface, read from sources or from a snapshot, and on our own sources as text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from packaging.version import Version

from tests.contract.signature import Signature, parse_signature
from tests.contract.source_tree import Definition, Member, SourceTree, members_of
from tests.contract.surface import Place, Surface, is_super, shape_of
from tests.contract.touch import How, Touch, Use

_EVERY_CLASS_HAS = frozenset({"__init__", "__post_init__", "__bool__", "__call__"})


def is_in(version: str, since: str | None, until: str | None) -> bool:
    """Whether ``version`` lies from ``since`` to ``until``, both included, patches too."""
    found = Version(version).release[:2]
    after = since is None or found >= Version(since).release[:2]
    return after and (until is None or found <= Version(until).release[:2])


def complaints(
    touches: Iterable[Touch], surface: Surface, version: str, own: SourceTree
) -> list[str]:
    """One sentence for each thing that does not fit; empty when all does.

    ``own`` is the tree of hisparsed itself, whose overrides are compared.
    """
    found: list[str] = []
    entries = list(touches)
    for touch in entries:
        place = surface.get(touch.target)
        expected = is_in(version, touch.since, touch.until)
        if place is None:
            if expected:
                found.append(f"{touch.target} is not there; {touch.breaks}")
            continue
        if not expected:
            found.append(f"{touch.target} is there, outside of since and until")
        for use in touch.uses:
            found.extend(
                f"{touch.target} {use.how} {use.name or 'itself'}: {what}"
                for what in _use_complaints(use, place, version)
            )
    for target in sorted({touch.target for touch in entries if touch.ours}):
        if target in surface:
            same = [touch for touch in entries if touch.target == target]
            found.extend(_class_complaints(same, surface[target], own))
    return found


def _use_complaints(use: Use, place: Place, version: str) -> Iterator[str]:
    problem = _problem(use, place)
    expected = is_in(version, use.since, use.until)
    if expected and problem is not None:
        yield problem
    if not expected and problem is None:
        yield "fits, outside of since and until"


def _problem(use: Use, place: Place) -> str | None:
    if use.how is How.TEXT:
        return None if use.name in place.texts else "the source has no such text"
    if use.how is How.FIELD:
        return _call_problem(place.call, Use(How.CALLS, "", 0, (use.name,)), only_name=True)
    if use.how is How.CALLS and not use.name:
        return _call_problem(place.call, use)
    member = place.members.get(use.name)
    if member is None:
        return "there is none"
    if use.how is How.SETS and member.removeprefix("abstract ") == "property":
        return "is a property without a setter"
    if use.how is How.CALLS:
        text = member.removeprefix("abstract ")
        if not text.startswith("("):
            return f"cannot be called, it is: {text}"
        return _call_problem(text[1:-1], use)
    return None


def _call_problem(text: str | None, use: Use, *, only_name: bool = False) -> str | None:
    if text is None:
        return "cannot be called"
    signature = parse_signature(text)
    if only_name:
        name = use.keywords[0]
        known = name in (*signature.positional, *signature.keyword_only)
        return None if known or signature.more_keywords else f"({text}) has no {name}"
    refusal = signature.refusal(use.positional, use.keywords)
    return None if refusal is None else f"({text}) {refusal}"


def _class_complaints(entries: list[Touch], place: Place, own: SourceTree) -> Iterator[str]:
    """Ours against vLLM's: overrides take as much, nothing is overridden by accident, and
    nothing abstract is left out."""
    target = entries[0].target
    uses = [use for touch in entries for use in touch.uses]
    named = {use.name for use in uses if use.how in (How.OVERRIDES, How.IMPLEMENTS, How.SETS)}
    overridden = {use.name for use in uses if use.how in (How.OVERRIDES, How.IMPLEMENTS)}
    for ours in dict.fromkeys(name for touch in entries for name in touch.ours):
        members = _own_members(own, ours)
        if members is None:
            yield f"{ours}, named as ours under {target}, is not there"
            continue
        yield from _super_problems(own, ours, place)
        for name in sorted(members.keys() & set(place.names) - named - _EVERY_CLASS_HAS):
            yield f"{ours}.{name} hides {target}.{name}, which is not in the table"
        for name in place.abstract:
            if name not in members:
                yield f"{ours} lacks {name}, which {target} wants"
        for name in sorted(overridden & members.keys() & place.members.keys()):
            for what in _override_problems(name, members[name], place):
                yield f"{ours}.{name}: {what}"


def _override_problems(name: str, ours: Member, place: Place) -> Iterator[str]:
    theirs = place.members[name].removeprefix("abstract ")
    if ours.signature is None or not theirs.startswith("("):
        return
    signature = parse_signature(ours.signature)
    narrower = signature.narrower(parse_signature(theirs[1:-1]))
    if narrower is not None:
        yield f"({ours.signature}) is called as ({theirs[1:-1]}): {narrower}"
    for shape in place.call_sites.get(name, ()):
        refusal = _shape_refusal(signature, shape)
        if refusal is not None:
            yield f"vLLM calls it with {shape}: it {refusal}"


def _super_problems(own: SourceTree, ours: str, place: Place) -> Iterator[str]:
    """Calls of ``super()`` in our class that vLLM's method does not take."""
    found = _own_class(own, ours)
    nodes = (
        node
        for one in (own.lineage(found) if found is not None else ())
        for node in ast.walk(one.class_node)
    )
    for node in nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name = node.func.attr
        theirs = place.members.get(name, "").removeprefix("abstract ")
        if not is_super(node.func.value) or not theirs.startswith("("):
            continue
        refusal = _shape_refusal(parse_signature(theirs[1:-1]), shape_of(node))
        if refusal is not None:
            yield f"{ours} calls {name}({shape_of(node)}) of vLLM's, ({theirs[1:-1]}): {refusal}"


def _shape_refusal(signature: Signature, shape: str) -> str | None:
    count, *keywords = shape.split(", ")
    if "*" in keywords or "**" in keywords:
        return None  # what is unpacked came from a caller that is judged elsewhere
    return signature.refusal(int(count), keywords)


def _own_class(own: SourceTree, place: str) -> Definition | None:
    module, _, name = place.partition(":")
    return own.find(f"{own.package}.{module}", name)


def _own_members(own: SourceTree, place: str) -> dict[str, Member] | None:
    found = _own_class(own, place)
    return None if found is None else members_of(own, found)
