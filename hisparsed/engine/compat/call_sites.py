"""How vLLM itself calls the methods that we override: the shapes of its calls, from its sources.

Only of method names that no unrelated class has: for those, ``x.name(...)`` says enough. Searches
the parts of vLLM that run on the engine's side.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from hisparsed.engine.compat.tree import SourceTree

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
