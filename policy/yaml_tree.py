"""YAML text to plain values that know their line; a strict reading of a small part of YAML.

One document, text keys, no tags, no merge keys, `true` and `false` as the only booleans, no
octal, sexagesimal or date surprises, bounded size, depth and aliases. Not for other people's YAML.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import yaml
from yaml.events import AliasEvent

from hisparsed.policy.problems import ConfigError, KeyPath, Problem, shown

MAX_BYTES: Final = 2**20
MAX_DEPTH: Final = 32
MAX_VALUES: Final = 20_000

_TAG: Final = "tag:yaml.org,2002:"
_SCALARS: Final = {
    "null": re.compile(r"~|null|Null|NULL|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?(?:0|[1-9][0-9]*)", re.ASCII),
    "float": re.compile(
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+", re.ASCII
    ),
}
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""No name, path or pattern needs one; the operating system takes no path with the first."""
# Python refuses to convert longer ones, and no setting needs them.
_MAX_DIGITS: Final = 40


@dataclass(frozen=True)
class Position:
    """Where a key and its value begin; lines and columns count from 1."""

    line: int
    column: int
    value_line: int
    value_column: int


@dataclass
class Tree:
    """A document read: its value, the place of every key, and the problems so far."""

    name: str
    value: dict[str, Any] = field(default_factory=dict)
    positions: dict[KeyPath, Position] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


class _Loader(yaml.SafeLoader):
    """Composes nodes only; values are made here, so that no constructor of YAML's ever runs."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 (the name and shape are PyYAML's)

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH and not self.check_event(AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(
                problem=f"is nested deeper than {MAX_DEPTH} levels", problem_mark=mark
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


for _kind, _pattern in _SCALARS.items():
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(f"(?:{_pattern.pattern})$"), None)


def read_scalar(text: str) -> bool | int | float | str | None:
    """One value as a document would read it without quotes: `3`, `true`, `null`, `10%`."""
    kind = next((kind for kind, pattern in _SCALARS.items() if pattern.fullmatch(text)), "str")
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "str" or len(text) > _MAX_DIGITS:
        return text
    return int(text) if kind == "int" else float(text)


def read_tree(text: str, name: str) -> Tree:
    """Read ``text``; ``name`` is what errors call the file.

    Raises ``ConfigError`` where reading cannot continue; lesser problems are in the result.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        _stop(name, text, 0, 0, f"is larger than {MAX_BYTES // 2**20}MiB")
    root = _compose(text, name)
    if not isinstance(root, yaml.MappingNode):
        if root is None or root.tag == _TAG + "null":
            _stop(name, text, 0, 0, "is empty", "write settings as `key: value` lines")
        line, column = _place(root.start_mark)
        message = "holds something else where settings belong"
        _stop(name, text, line, column, message, "write `key: value` lines")
    tree = Tree(name)
    value = _Builder(tree, text).build(root, ())
    tree.value = value if isinstance(value, dict) else {}
    return tree


def _compose(text: str, name: str) -> yaml.Node | None:
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        message = f"the character U+{ord(text[error.position]):04X} is not allowed"
        _stop(name, text, line, column, message, "remove it")
    except yaml.MarkedYAMLError as error:
        line, column = _place(error.problem_mark or error.context_mark)
        _stop(name, text, line, column, *_syntax(error))
    finally:
        if loader is not None:
            loader.dispose()


def _syntax(error: yaml.MarkedYAMLError) -> tuple[str, str]:
    problem = error.problem or "cannot be read"
    if "'\\t'" in problem:
        return "a tab is used for indentation", "indent with spaces"
    if error.context and "single document" in error.context:
        return "a second document begins here", "keep one document in a file; remove the `---`"
    if problem.startswith("is nested"):
        return problem, "write it flatter"
    context = f"{error.context}, " if error.context else ""
    return f"not readable as YAML: {context}{problem}", ""


def _place(mark: Any) -> tuple[int, int]:
    return (mark.line + 1, mark.column + 1) if mark is not None else (0, 0)


def _stop(name: str, text: str, line: int, column: int, message: str, hint: str = "") -> NoReturn:
    one_for_one = text.encode("utf-8", "replace").decode("utf-8")
    raise ConfigError((Problem(name, line, column, (), "", message, hint),), one_for_one) from None


class _Builder:
    """Walks composed nodes, making values and noting positions and problems."""

    def __init__(self, tree: Tree, text: str) -> None:
        self._tree = tree
        self._text = text
        self._values = 0
        self._open: set[int] = set()

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        self._values += 1
        if self._values > MAX_VALUES:
            message = f"has more than {MAX_VALUES} values once its aliases are written out"
            _stop(self._tree.name, self._text, *_place(node.start_mark), message)
        if id(node) in self._open:
            line, column = _place(node.start_mark)
            _stop(self._tree.name, self._text, line, column, "an alias contains itself")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
                return self._sequence(node, path)
            if isinstance(node, yaml.ScalarNode):
                return self._scalar(node, path)
            return self._refuse_tag(node, path)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
                what = shown(key) if isinstance(key, str) else "a list or a section"
                self._note(key_node, path, f"{what} cannot be a key", "write keys as text")
                continue
            key = self._whole(key_node, key, path)
            if key in result:
                first = self._tree.positions[(*path, key)].line
                hint = f"it is on line {first} already; remove one of them"
                self._note(key_node, (*path, key), "is there twice", hint)
                continue
            self._tree.positions[(*path, key)] = Position(
                *_place(key_node.start_mark), *_place(value_node.start_mark)
            )
            result[key] = self.build(value_node, (*path, key))
        return result

    def _sequence(self, node: yaml.SequenceNode, path: KeyPath) -> list[Any]:
        result = []
        for index, item in enumerate(node.value):
            place = _place(item.start_mark)
            self._tree.positions[(*path, index)] = Position(*place, *place)
            result.append(self.build(item, (*path, index)))
        return result

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        text: str = node.value
        kind = node.tag.removeprefix(_TAG)
        if kind == "str":
            return self._whole(node, text, path)
        pattern = _SCALARS.get(kind)
        if pattern is None or pattern.fullmatch(text) is None:
            return self._refuse_tag(node, path)
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if len(text) > _MAX_DIGITS:
            self._note(node, path, f"{shown(text)} has too many digits", "write a shorter number")
            return 0
        return int(text) if kind == "int" else float(text)

    def _whole(self, node: yaml.Node, text: str, path: KeyPath) -> str:
        """``text``, which an escape such as `"\\ud800"` can give half of a character."""
        found = text.encode("utf-8", "backslashreplace").decode("utf-8")
        if found != text:
            hint = "write both halves of the pair, or remove the character"
            self._note(node, path, f"{shown(found)} has half of a character", hint)
        if _CONTROL.search(found):
            self._note(node, path, f"{shown(found)} has a control character", "remove it")
        return found

    def _refuse_tag(self, node: yaml.Node, path: KeyPath) -> None:
        tag = node.tag.replace(_TAG, "!!")
        self._note(node, path, f"the tag {shown(tag)} is not allowed here", "remove it")

    def _note(self, node: yaml.Node, path: KeyPath, message: str, hint: str) -> None:
        line, column = _place(node.start_mark)
        self._tree.problems.append(Problem(self._tree.name, line, column, path, "", message, hint))
