"""The part of one vLLM that the table names, read from its sources; and the snapshots of it.

`python -m tests.contract.surface --update TREES`, in the repository, reads TREES/<version>/vllm of
every tested version and writes the snapshots; with the path of one vllm folder it prints what is
there. Does not import vLLM.

Also reads how vLLM itself calls the methods that we override: only of method names that no
unrelated class has, because for those ``x.name(...)`` says enough.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hisparsed.engine.compat.versions import TESTED
from tests.contract.source_tree import (
    Definition,
    Function,
    Module,
    SourceTree,
    call_signature,
    members_of,
)
from tests.contract.touch import How, Touch
from tests.contract.touched import all_touched

SEARCHED = (
    "v1/core",
    "v1/engine",
    "v1/executor",
    "v1/hisparse",
    "v1/kv_offload",
    "v1/metrics",
    "v1/worker",
    "distributed/kv_transfer",
)


def call_shapes(
    tree: SourceTree, methods: Mapping[str, set[str]]
) -> dict[str, dict[str, tuple[str, ...]]]:
    """By target and method, calls as "2, keyword, *, **". ``methods``: names by target."""
    wanted = {name for names in methods.values() for name in names}
    shapes: dict[str, set[str]] = {name: set() for name in wanted}
    definers: dict[str, set[str]] = {name: set() for name in wanted}
    for folder in SEARCHED:
        for file in sorted((tree.folder / folder).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            if not any(f"{name}(" in text for name in wanted):
                continue
            parts = file.relative_to(tree.folder).with_suffix("").parts
            name = ".".join([tree.package, *parts]).removesuffix(".__init__")
            module = tree.module(name)
            if module is not None:
                _collect(module.body, name, wanted, shapes, definers)
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for target, names in methods.items():
        family = _family(tree, target)
        for method in sorted(names):
            if shapes[method] and all(
                place in family or _related(tree, place, family) for place in definers[method]
            ):
                found.setdefault(target, {})[method] = tuple(sorted(shapes[method]))
    return found


def _family(tree: SourceTree, target: str) -> set[str]:
    module, _, name = target.partition(":")
    definition = tree.find(module, name)
    return set() if definition is None else {one.place for one in tree.lineage(definition)}


def _related(tree: SourceTree, place: str, family: set[str]) -> bool:
    """Whether the class at ``place`` derives from one of the family."""
    module, _, name = place.partition(":")
    definition = tree.find(module, name)
    return definition is not None and any(one.place in family for one in tree.lineage(definition))


def _collect(
    body: ast.Module,
    module: str,
    wanted: set[str],
    shapes: dict[str, set[str]],
    definers: dict[str, set[str]],
) -> None:
    for node in ast.walk(body):
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                if (
                    isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
                    and statement.name in wanted
                ):
                    definers[statement.name].add(f"{module}:{node.name}")
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in wanted
            and not is_super(node.func.value)
        ):
            shapes[node.func.attr].add(shape_of(node))


def is_super(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    )


def shape_of(call: ast.Call) -> str:
    """As "2, flag, **": positional arguments, keywords, and whether more are unpacked."""
    plain = [one for one in call.args if not isinstance(one, ast.Starred)]
    parts = [str(len(plain)), *sorted(key.arg for key in call.keywords if key.arg)]
    if len(plain) < len(call.args):
        parts.append("*")
    if any(key.arg is None for key in call.keywords):
        parts.append("**")
    return ", ".join(parts)


SNAPSHOTS = Path("tests/contract/snapshots")


@dataclass(frozen=True)
class Place:
    """One target as a version has it.

    ``at``: where it is written. ``call``: parameters, where it is called or its fields are set.
    ``members``: those in the table, by name. ``names``: all of a class that we derive from.
    """

    at: str
    bases: tuple[str, ...] = ()
    call: str | None = None
    members: Mapping[str, str] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    abstract: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    call_sites: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


Surface = Mapping[str, Place]
"""By target. What a version does not have is left out."""


def read_surface(
    tree: SourceTree, touches: Iterable[Touch], *, call_sites: bool = True
) -> dict[str, Place]:
    """Several entries of one target are read as one. ``call_sites`` takes seconds."""
    by_target: dict[str, list[Touch]] = {}
    for touch in touches:
        by_target.setdefault(touch.target, []).append(touch)
    shapes = call_shapes(tree, _overridden(by_target)) if call_sites else {}
    found: dict[str, Place] = {}
    for target, entries in sorted(by_target.items()):
        place = _read(tree, entries, shapes)
        if place is not None:
            found[target] = place
    return found


def _overridden(by_target: Mapping[str, list[Touch]]) -> dict[str, set[str]]:
    """By class, the methods of ours that vLLM calls."""
    return {
        target: names
        for target, entries in by_target.items()
        if (
            names := {
                use.name
                for touch in entries
                for use in touch.uses
                if touch.ours
                and use.how in (How.OVERRIDES, How.IMPLEMENTS)
                and use.name != "__init__"
            }
        )
    }


def _read(
    tree: SourceTree, entries: list[Touch], shapes: Mapping[str, Mapping[str, tuple[str, ...]]]
) -> Place | None:
    touch = entries[0]
    uses = [use for entry in entries for use in entry.uses]
    wanted = {use.name for use in uses if use.how is not How.TEXT and use.name}
    literals = {use.name for use in uses if use.how is How.TEXT}
    if not touch.name:
        module = tree.module(touch.module)
        return None if module is None else _read_module(tree, module, wanted, literals)
    found = tree.find(touch.module, touch.name)
    if found is None:
        return None
    called = any(use.how is How.FIELD or (use.how is How.CALLS and not use.name) for use in uses)
    call = call_signature(tree, found) if called else None
    texts = _texts(found.module, literals)
    if isinstance(found.node, Function):
        return Place(found.place, call=call, texts=texts)
    members = members_of(tree, found)
    derived = any(entry.ours for entry in entries)
    return Place(
        found.place,
        bases=tuple(base.place for base in tree.bases(found)),
        call=call,
        members={name: members[name].text() for name in sorted(wanted) if name in members},
        texts=texts,
        abstract=tuple(sorted(name for name, one in members.items() if one.abstract))
        if derived
        else (),
        names=tuple(sorted(members)) if derived else (),
        call_sites=shapes.get(touch.target, {}),
    )


def _read_module(tree: SourceTree, module: Module, wanted: set[str], literals: set[str]) -> Place:
    members: dict[str, str] = {}
    for name in sorted(wanted):
        found = tree.find(module.name, name)
        if found is not None:
            members[name] = _shown(tree, found)
        elif name in module.bound or name in module.imported:
            members[name] = "value"
    return Place(module.name, members=members, texts=_texts(module, literals))


def _shown(tree: SourceTree, found: Definition) -> str:
    return f"({call_signature(tree, found)})" if isinstance(found.node, Function) else "class"


def _texts(module: Module, literals: set[str]) -> tuple[str, ...]:
    if not literals:
        return ()
    present = {
        node.value
        for node in ast.walk(module.body)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return tuple(sorted(literals & present))


# --- snapshots --------------------------------------------------------------------------


def surface_text(surface: Surface) -> str:
    """JSON, a line for each target; what is empty is left out."""
    lines = (
        f"{json.dumps(target)}: {json.dumps(_plain(place))}"
        for target, place in sorted(surface.items())
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _plain(place: Place) -> dict[str, Any]:
    return {key: value for key, value in vars(place).items() if value not in (None, (), {})}


def parse_surface(text: str) -> dict[str, Place]:
    """The inverse of ``surface_text``."""
    return {target: _place(raw) for target, raw in json.loads(text).items()}


def _place(raw: Mapping[str, Any]) -> Place:
    known = dict(raw)
    known["call_sites"] = {
        name: tuple(shapes) for name, shapes in known.get("call_sites", {}).items()
    }
    for key in ("bases", "texts", "abstract", "names"):
        known[key] = tuple(known.get(key, ()))
    return Place(**known)


def update_snapshots(trees: Path, into: Path) -> None:
    """Write a snapshot of every tested version: of ``trees``/<version>/vllm.

    Raises ``ValueError`` where one is missing; nothing is written then.
    """
    texts = {
        version: surface_text(read_surface(SourceTree(trees / version / "vllm"), all_touched()))
        for version in TESTED
    }
    into.mkdir(parents=True, exist_ok=True)
    for version, text in texts.items():
        (into / f"{version}.json").write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.contract.surface")
    parser.add_argument("tree", nargs="?", type=Path, help="a vllm package folder to print")
    parser.add_argument("--update", type=Path, metavar="TREES", help="folder of all versions")
    parser.add_argument("--into", type=Path, default=SNAPSHOTS, help="folder of the snapshots")
    chosen = parser.parse_args(arguments)
    if chosen.update is not None:
        update_snapshots(chosen.update, chosen.into)
        sys.stdout.write(f"{chosen.into}: vLLM {', '.join(TESTED)}\n")
    elif chosen.tree is not None:
        sys.stdout.write(surface_text(read_surface(SourceTree(chosen.tree), all_touched())))
    else:
        parser.error("give a vllm package folder, or --update TREES")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
