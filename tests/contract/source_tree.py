"""Reads a package's Python sources as text, and what its classes and functions offer.

Never imports them, so vLLM's CUDA wheels can be read on a machine without a GPU or their libraries.
Finds a class or function through re-exports, its bases within the package, and its members;
attributes that methods set on ``self`` count. Knows nothing of what we use.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.contract.signature import signature_text

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file. ``is_package``: an ``__init__.py``, whose relative imports start in it."""

    name: str
    body: ast.Module
    is_package: bool

    @cached_property
    def bound(self) -> dict[str, ast.AST]:
        """What the module's own statements bind, by name: definitions and assignments."""
        found: dict[str, ast.AST] = {}
        for node in _statements(self.body):
            if isinstance(node, ast.ClassDef | Function):
                found.setdefault(node.name, node)
            for name in _assigned(node):
                found.setdefault(name, node)
        return found

    @cached_property
    def imported(self) -> dict[str, tuple[str, str]]:
        """Names from imports: (module, name there), with "" for a module itself."""
        found: dict[str, tuple[str, str]] = {}
        for node in _statements(self.body):
            if isinstance(node, ast.ImportFrom):
                source = self._source(node)
                for alias in node.names:
                    found.setdefault(alias.asname or alias.name, (source, alias.name))
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    found.setdefault(name, (alias.name if alias.asname else name, ""))
        return found

    @cached_property
    def lazy(self) -> dict[str, tuple[str, str]]:
        """Names that a module's ``__getattr__`` resolves, from tables of "module:name" text."""
        found: dict[str, tuple[str, str]] = {}
        if not isinstance(self.bound.get("__getattr__"), Function):
            return found
        for node in ast.walk(self.body):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    name, place = _text(key), _text(value)
                    if name and place and ":" in place:
                        source, _, there = place.partition(":")
                        source = f"{self.name}{source}" if source.startswith(".") else source
                        found.setdefault(name, (source, there))
        return found

    def _source(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        keep = len(parts) - node.level + (1 if self.is_package else 0)
        return ".".join([*parts[:keep], *([node.module] if node.module else [])])


@dataclass(frozen=True)
class Definition:
    """A class or function where it is written."""

    module: Module
    node: ast.ClassDef | Function

    @property
    def place(self) -> str:
        return f"{self.module.name}:{self.node.name}"

    @property
    def class_node(self) -> ast.ClassDef:
        """Raises ``TypeError`` for a function."""
        if not isinstance(self.node, ast.ClassDef):
            raise TypeError(f"{self.place} is a function, not a class")
        return self.node


class SourceTree:
    """``folder`` is the package itself: ".../vllm". Files are parsed when they are asked for."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "__init__.py").is_file():
            raise ValueError(f"{folder} has no __init__.py; give the folder of the package itself")
        self.folder = folder
        self.package = folder.name
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """``None`` where the package has no such module."""
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> Module | None:
        first, *rest = name.split(".")
        if first != self.package:
            return None
        path = self.folder.joinpath(*rest)
        for file, is_package in ((path / "__init__.py", True), (path.with_suffix(".py"), False)):
            if file.is_file() and (is_package or rest):
                return Module(name, ast.parse(file.read_text(encoding="utf-8")), is_package)
        return None

    def find(self, module_name: str, name: str) -> Definition | None:
        """A class or function, through re-exports."""
        seen: set[tuple[str, str]] = set()
        while (module_name, name) not in seen:
            seen.add((module_name, name))
            module = self.module(module_name)
            if module is None:
                return None
            node = module.bound.get(name)
            if isinstance(node, ast.ClassDef | Function):
                return Definition(module, node)
            alias = self._alias(node)
            if alias is not None:
                name = alias
                continue
            place = module.imported.get(name) or module.lazy.get(name)
            if place is None or not place[1]:
                return None
            module_name, name = place
        return None

    @staticmethod
    def _alias(node: ast.AST | None) -> str | None:
        """``B`` of a module's ``A = B``."""
        value = getattr(node, "value", None)
        return value.id if isinstance(node, ast.Assign) and isinstance(value, ast.Name) else None

    def lineage(self, found: Definition) -> list[Definition]:
        """The class and its bases within the package, in the order in which Python looks."""
        order: list[Definition] = []
        self._collect(found, order)
        return order

    def _collect(self, found: Definition, order: list[Definition]) -> None:
        # Depth first with a shared base moved behind its last child: Python's order for the
        # single chains and mixins met here.
        known = [one.place for one in order]
        if found.place in known:
            order.pop(known.index(found.place))
        order.append(found)
        for base in self.bases(found):
            self._collect(base, order)

    def bases(self, found: Definition) -> Iterator[Definition]:
        if not isinstance(found.node, ast.ClassDef):
            return
        for base in found.node.bases:
            expression = base.value if isinstance(base, ast.Subscript) else base
            definition = self._resolve(found.module, expression)
            if definition is not None and isinstance(definition.node, ast.ClassDef):
                yield definition

    def _resolve(self, module: Module, expression: ast.expr) -> Definition | None:
        if isinstance(expression, ast.Name):
            return self.find(module.name, expression.id)
        if isinstance(expression, ast.Attribute) and isinstance(expression.value, ast.Name):
            source, name = module.imported.get(expression.value.id, ("", ""))
            return self.find(f"{source}.{name}" if name else source, expression.attr)
        return None


def _statements(body: ast.Module) -> Iterator[ast.stmt]:
    """Statements of a module, those under ``if`` and ``try`` included."""
    waiting = list(body.body)[::-1]
    while waiting:
        node = waiting.pop()
        yield node
        for inner in ("finalbody", "orelse", "handlers", "body"):
            if isinstance(node, ast.If | ast.Try | ast.ExceptHandler | ast.With):
                waiting.extend(reversed(getattr(node, inner, [])))


def _assigned(node: ast.AST) -> Iterator[str]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id
        elif isinstance(target, ast.Tuple):
            yield from (one.id for one in target.elts if isinstance(one, ast.Name))


def _text(node: ast.AST | None) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None


_PROPERTIES = {"property", "cached_property", "abstractproperty"}


@dataclass(frozen=True, slots=True)
class Member:
    """``kind``: method, property, settable (a property with a setter), field, attribute or value.

    ``signature`` is of methods. ``abstract``: a subclass has to bring it.
    """

    kind: str
    signature: str | None = None
    abstract: bool = False

    def text(self) -> str:
        """One short line, as snapshots keep it."""
        shown = f"({self.signature})" if self.signature is not None else self.kind
        return f"abstract {shown}" if self.abstract else shown


def members_of(tree: SourceTree, found: Definition) -> dict[str, Member]:
    """Members of a class, its bases in the package included; the nearest one counts."""
    members: dict[str, Member] = {}
    for definition in tree.lineage(found):
        for name, member in _own_members(definition).items():
            known = members.get(name)
            # An abstract property whose value a subclass sets is an attribute there.
            if known is None or (known.kind == "attribute" and member.kind in ("field", "value")):
                members[name] = member
    return members


def abstract_members(tree: SourceTree, found: Definition) -> list[str]:
    """What a subclass of ``found`` has to bring."""
    return sorted(name for name, one in members_of(tree, found).items() if one.abstract)


def call_signature(tree: SourceTree, found: Definition) -> str:
    """Parameters of a function, of a class's ``__init__``, or the fields of a data class."""
    if isinstance(found.node, Function):
        return signature_text(found.node.args, skip_first=False)
    fields: dict[str, str] = {}
    plain: str | None = None
    for definition in reversed(tree.lineage(found)):
        init = _initialiser(definition.class_node)
        if init is not None:
            plain, fields = signature_text(init.args, skip_first=True), {}
        else:
            fields.update(_fields(definition.class_node))
    if plain is not None and not (fields and _is_data_class(found.class_node)):
        return plain
    # Fields with defaults may stand before others in a base; by keyword that is no matter.
    required = [text for text in fields.values() if not text.endswith("=...")]
    return ", ".join([*required, *(text for text in fields.values() if text.endswith("=..."))])


def _initialiser(node: ast.ClassDef) -> Function | None:
    for statement in node.body:
        if isinstance(statement, Function) and statement.name in ("__init__", "__new__"):
            return statement
    return None


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Annotated names and how a constructor made of them shows each."""
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if "ClassVar" in ast.dump(statement.annotation):
            continue
        name, value = statement.target.id, statement.value
        yield name, name if value is None or _is_required(value) else f"{name}=..."


def _own_members(found: Definition) -> dict[str, Member]:
    members: dict[str, Member] = {}
    for node in found.class_node.body:
        if isinstance(node, Function):
            _add_function(members, node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            members[node.target.id] = Member("field")
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    members[target.id] = Member("value")
    for node in found.class_node.body:
        if isinstance(node, Function):
            for name in _set_on_self(node):
                members.setdefault(name, Member("attribute"))
    return members


def _add_function(members: dict[str, Member], node: Function) -> None:
    marks = {_last_name(decorator) for decorator in node.decorator_list}
    abstract = any(mark.startswith("abstract") for mark in marks)
    if "setter" in marks:
        members[node.name] = Member("settable")
    elif marks & _PROPERTIES:
        # functools' own keeps the value in the instance, which may be set.
        kind = "settable" if "cached_property" in marks else "property"
        members.setdefault(node.name, Member(kind, abstract=abstract))
    elif "overload" not in marks:
        text = signature_text(node.args, skip_first="staticmethod" not in marks)
        members[node.name] = Member("method", text, abstract)


def _set_on_self(function: Function) -> Iterator[str]:
    by_position = [*function.args.posonlyargs, *function.args.args]
    if not by_position:
        return
    me = by_position[0].arg
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == me
        ):
            yield node.attr


def _last_name(decorator: ast.expr) -> str:
    node = decorator.func if isinstance(decorator, ast.Call) else decorator
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_data_class(node: ast.ClassDef) -> bool:
    marks = {_last_name(decorator) for decorator in node.decorator_list}
    return bool(marks & {"dataclass", "config"})


def _is_required(value: ast.expr) -> bool:
    """``field(...)`` without a default."""
    if not isinstance(value, ast.Call) or _last_name(value) not in ("field", "Field"):
        return False
    return not value.args and not any(
        keyword.arg in ("default", "default_factory") for keyword in value.keywords
    )
