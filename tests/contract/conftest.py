"""Surfaces of vLLM and our own sources, read once a session."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import hisparsed
from tests.contract.source_tree import SourceTree
from tests.contract.surface import Place, parse_surface

TREES_ENV = "HISPARSED_VLLM_TREES"
Snapshot = Callable[[str], dict[str, Place]]


@cache
def _snapshot(version: str) -> dict[str, Place]:
    path = Path(__file__).parent / "snapshots" / f"{version}.json"
    return parse_surface(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def snapshot() -> Snapshot:
    """What was read from a version, by its number."""
    return _snapshot


@pytest.fixture(scope="session")
def own() -> SourceTree:
    return SourceTree(Path(hisparsed.__file__).parent)


@pytest.fixture(scope="session")
def tree_of() -> Callable[[str], Path]:
    """The sources of a version, as `make contract` fetches them; skips where they are not."""

    def find(version: str) -> Path:
        folder = os.environ.get(TREES_ENV)
        if not folder:
            pytest.skip(f"{TREES_ENV} is not set: `make contract` fetches vLLM's sources")
        tree = Path(folder) / version / "vllm"
        if not tree.is_dir():
            pytest.skip(f"vLLM {version} was not fetched into {folder}")
        return tree

    return find
