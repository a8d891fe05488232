"""A node as it was recorded, feeds that say what a test says, and a node that really serves."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_node import FakeNode
from recorded_node import RecordedFeed, recorded_model

from hisparsed.tui.app import TopApp
from hisparsed.tui.feed import NodeSession
from hisparsed.tui.model import NodeModel


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Times on the screen are local; here local is UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "HISPARSED_SOCKET", "TEXTUAL_ANIMATIONS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def model() -> NodeModel:
    return recorded_model()


@pytest.fixture
def make_app() -> Callable[..., TopApp]:
    """An application on recorded nodes; its clock shows the time of the recording."""

    def make(*labels: str, **options: object) -> TopApp:
        sessions = []
        for label in labels or ("node-1",):
            model = recorded_model(label)
            sessions.append(NodeSession(model, RecordedFeed))
        now_s = sessions[0].model.node_time_s
        assert now_s is not None
        return TopApp(sessions, clock=lambda: now_s, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[FakeNode]:
    """A node on a Unix socket that answers what was recorded."""
    served = FakeNode(tmp_path / "control.sock")
    await served.start()
    yield served
    await served.stop()
