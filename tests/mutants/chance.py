"""Mutants by chance: small changes at random places, each against all quick tests of its area.

`python -m tests.mutants.chance --count 30 --seed 16 --list FILE` makes ``FILE``, in the form of
`mutants.yaml`, and says how many die; a ``FILE`` that is there is tried again. Some mutants change
nothing that can be seen, so the rate is for comparing: tests before and after a change of them.
"""

import argparse
import ast
import copy
import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import yaml

from tests.mutants.mutation import ROOT, Mutant, copy_with, failures, node_ids, place_of, stands


class Area(NamedTuple):
    code: tuple[str, ...]
    """Patterns of files."""
    tests: tuple[str, ...]
    of_ten: int
    """So many of ten mutants are in this area."""


KERNELS = ("state", "state_bank", "torch_*", "resolution", "upkeep", "bank_shrink", "curve")
NOT_TRITON = "--ignore=tests/kernels/test_triton.py"
AREAS = (
    Area(("policy/*.py",), ("tests/policy",), 3),
    Area(("hisparsed/engine/host/*.py",), ("tests/engine/host",), 3),
    Area(tuple(f"kernels/{name}.py" for name in KERNELS), ("tests/kernels", NOT_TRITON), 2),
    Area(("hisparsed/node/**/*.py",), ("tests/node", "-m", "not engine and not long"), 2),
)
ONE_BY_ONE = ("-x", "-n", "0", "--timeout", "600")
_PAIRS: list[tuple[type[ast.AST], type[ast.AST]]] = [
    *[(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)],
    *[(ast.In, ast.NotIn), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.And, ast.Or)],
]
_OTHER = dict(_PAIRS) | {other: one for one, other in _PAIRS}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_NOT_CODE = ("annotation", "returns", "decorator_list")


def changed(node: ast.expr | ast.stmt) -> ast.AST | None:
    """The replacement of ``node`` with one error; ``None`` where there is none."""
    other = copy.deepcopy(node)
    match other:
        case ast.Compare(ops=[operator]) if type(operator) in _OTHER:
            setattr(other, "ops", [_OTHER[type(operator)]()])  # noqa: B010
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in _OTHER:
            setattr(other, "op", _OTHER[type(operator)]())  # noqa: B010
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Constant(value=bool(value)):
            other.value = not value
        case ast.Constant(value=int(value)):
            other.value = value + 1
        case ast.Call(func=ast.Name(id=name) as function) if name in _NAMES:
            function.id = _NAMES[name]
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.AugAssign():
            return ast.Pass()
        case ast.Return(value=ast.expr()):
            other.value = ast.Constant(None)
        case _:
            return None
    return other


def places(tree: ast.AST, inside: bool = False) -> Iterator[ast.expr | ast.stmt]:
    """The statements of functions, not their annotations, decorators and texts."""
    inside = inside or isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef)
    for name, value in ast.iter_fields(tree):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or name in _NOT_CODE:
                continue
            if isinstance(child, ast.JoinedStr):
                continue
            if inside and isinstance(child, ast.expr | ast.stmt):
                yield child
            yield from places(child, inside)


def mutants_of(area: Area) -> Iterator[Mutant]:
    for path in sorted(path for pattern in area.code for path in ROOT.glob(pattern)):
        lines = (text := path.read_text("utf-8")).splitlines(keepends=True)
        for node in places(ast.parse(text)):
            if (other := changed(node)) is None:
                continue
            put = ast.unparse(other)
            put = f"({put})" if isinstance(other, ast.expr) else put
            begin, end = node.lineno - 1, node.end_lineno or node.lineno
            head = lines[begin].encode()[: node.col_offset].decode()
            tail = lines[end - 1].encode()[node.end_col_offset :].decode()
            new = head + put + tail
            first = begin
            while first and stands("".join(lines[first:end])) > 1:
                first -= 1
            before = "".join(lines[first:begin])
            old = before + "".join(lines[begin:end])
            name = f"{path.relative_to(ROOT)}:{node.lineno}:{node.col_offset}"
            if stands(old) == 1:
                yield Mutant(name, "", old, before + new, [])


def chosen(count: int, seed: int) -> list[Mutant]:
    rng = random.Random(seed)
    each = ((list(mutants_of(area)), round(count * area.of_ten / 10)) for area in AREAS)
    return [one for found, number in each for one in rng.sample(found, number)]


def killers(mutant: Mutant) -> list[str]:
    """The first test of its area that fails, or what pytest says where it cannot even begin.

    The test that failed before is tried first, also if it is marked long now.
    """
    path = place_of(mutant)[0]
    area = next(one for one in AREAS if any(path in ROOT.glob(pattern) for pattern in one.code))
    with copy_with(mutant) as tree, suppress(LookupError):
        if mutant.killed_by and (again := failures(tree, *ONE_BY_ONE, *node_ids(mutant.killed_by))):
            return sorted(again)
    with copy_with(mutant) as tree:
        try:
            return sorted(failures(tree, "-m", "not long", *ONE_BY_ONE, *area.tests))
        except RuntimeError as error:
            return [str(error).splitlines()[0]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=16)
    parser.add_argument("--list", type=Path, help="where the mutants are kept", required=True)
    asked = parser.parse_args()
    if asked.list.exists():
        mutants = [Mutant(**one) for one in yaml.safe_load(asked.list.read_text("utf-8"))]
    else:
        mutants = chosen(asked.count, asked.seed)
    tried: list[Mutant] = []
    for mutant in mutants:
        tried.append(mutant._replace(killed_by=killers(mutant)))
        fate = ", ".join(tried[-1].killed_by) or "SURVIVED"
        sys.stdout.write(f"{mutant.name}  {fate}\n")
        sys.stdout.flush()
    if not asked.list.exists():
        listed = yaml.safe_dump([one._asdict() for one in tried], sort_keys=False)
        asked.list.write_text(listed, "utf-8")
    sys.stdout.write(f"{sum(bool(one.killed_by) for one in tried)} of {len(tried)} killed\n")


if __name__ == "__main__":
    main()
