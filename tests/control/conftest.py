"""Fixtures of a control side with a scripted engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from control_node import POLICY, Node


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def make_node(tmp_path: Path) -> Callable[[str], Node]:
    return lambda policy: Node(tmp_path, policy)


@pytest.fixture
def policy_text() -> str:
    return POLICY
