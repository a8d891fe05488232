"""The mutants of `mutants.yaml`: where their code and tests stand, and which tests see them."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
CODE = ("hisparsed", "policy", "kernels", "tui")
WITHOUT_ENGINE = ("tests", "-m", "not engine and not long")
_NAMED = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_NOT_COPIED = (".git", ".venv", "build", "dist", "__pycache__", ".*_cache", ".hypothesis")


class Mutant(NamedTuple):
    """``old`` stands once in ``CODE``, in ``function``; with ``new`` the tests named must fail."""

    name: str
    function: str
    old: str
    new: str
    killed_by: list[str]


def mutants() -> list[Mutant]:
    listed = yaml.safe_load(Path(__file__).with_name("mutants.yaml").read_text("utf-8"))
    return [Mutant(**one) for one in listed]


@cache
def _files(*folders: str) -> dict[Path, str]:
    """Text by path; a file that is reached through a link is left to its own folder."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {path: path.read_text("utf-8") for path in found if path.resolve() == path}


def stands(text: str) -> int:
    """How often in the code."""
    return sum(one.count(text) for one in _files(*CODE).values())


def place_of(mutant: Mutant) -> tuple[Path, str]:
    """The file, and the function around ``old``. Raises ``LookupError`` unless it is there once."""
    counts = {path: text.count(mutant.old) for path, text in _files(*CODE).items()}
    if (count := sum(counts.values())) != 1:
        raise LookupError(f"{mutant.name}: its text stands {count} times in the code")
    path = max(counts, key=counts.__getitem__)
    before, _, _ = (text := _files(*CODE)[path]).partition(mutant.old)
    return path, ".".join(_names_around(ast.parse(text), before.count("\n") + 1))


def _names_around(node: ast.AST, line: int) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _NAMED) and child.lineno <= line <= (child.end_lineno or 0):
            yield child.name
            yield from _names_around(child, line)


def node_ids(tests: Iterable[str]) -> Iterator[str]:
    """The names that pytest gives these functions. Raises ``LookupError`` for one that is not there
    once."""
    for test in dict.fromkeys(tests):
        define = re.compile(rf"^(?:async )?def {test}\(", re.MULTILINE)
        paths = [path for path, text in _files("tests").items() if define.search(text)]
        if len(paths) != 1:
            raise LookupError(f"{test}: {len(paths)} files have such a test")
        yield f"{paths[0].relative_to(ROOT)}::{test}"


@contextmanager
def copy_with(mutant: Mutant | None) -> Iterator[Path]:
    """A copy of the tree, what was built in it included, with the mutant in its code."""
    with TemporaryDirectory(prefix="hisparsed-mutant-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        if mutant is not None:
            path = copy / place_of(mutant)[0].relative_to(ROOT)
            path.write_text(path.read_text("utf-8").replace(mutant.old, mutant.new), "utf-8")
        yield copy


def failures(tree: Path, *arguments: str) -> set[str]:
    """Names of the tests that fail there. Raises ``RuntimeError`` when they cannot be run."""
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", *arguments]
    done = subprocess.run(command, check=False, cwd=tree, env=environment, capture_output=True)
    said = done.stdout.decode(errors="replace")
    failed = set(re.findall(r"^(?:FAILED|ERROR) \S+?::(\w+)", said, re.MULTILINE))
    if done.returncode not in (0, 1) or bool(failed) != bool(done.returncode):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{said[-2000:]}")
    return failed
