"""A canary over any engine, and what a control side has around it; vLLM in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from side import IDLE, Side

from hisparsed.policy.signals import EngineReport

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["HISPARSED_ENGINE"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@pytest.fixture
def make_side(tmp_path: Path) -> Callable[..., Side]:
    return lambda engine, exact=True: Side(tmp_path, engine, exact=exact)


@pytest.fixture
def report() -> EngineReport:
    """Of a node that is not busy."""
    return IDLE
