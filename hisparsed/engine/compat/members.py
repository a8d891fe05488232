"""What a class, function or module of a source tree offers, member by member.

Attributes that methods set on ``self`` count, and so do those of bases in the same package.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from hisparsed.engine.compat.signature import signature_text
from hisparsed.engine.compat.tree import Definition, Function, SourceTree

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
