"""The view of the demo: its line of progress, and the two ways to leave it."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
from textual.widgets import Static

from hisparsed.cli.traffic import _has_terminal
from hisparsed.demo.screen import DemoApp, Left
from hisparsed.tui.app import FleetScreen, NodeScreen
from hisparsed.tui.client import NodeClient
from hisparsed.tui.feed import live_session
from hisparsed.tui.options import parse_address


def demo_app(folder: Path, words: list[str]) -> DemoApp:
    """On two nodes that do not answer."""
    sessions = [
        live_session(NodeClient(parse_address(f"{name}={folder}/{name}.sock")))
        for name in ("policy-on", "policy-off")
    ]
    return DemoApp(sessions, lambda: words[-1], ascii_only=False, no_color=False)


def progress_line(app: DemoApp) -> str:
    return str(app.screen.query_one("#demo", Static).render())


async def test_the_view_begins_on_the_first_node_and_shows_progress(tmp_path: Path) -> None:
    words = ["1 of 9 calls"]
    app = demo_app(tmp_path, words)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        app.draw()
        await pilot.pause()
        assert isinstance(app.screen, NodeScreen)
        assert app.screen.session.model.label == "policy-on"
        assert "1 of 9 calls. q: leave" in progress_line(app)
        words.append("2 of 9 calls")
        app.draw()
        await pilot.pause()
        assert "2 of 9 calls" in progress_line(app)
        assert len(app.screen.query("#demo")) == 1
        await pilot.press("escape")
        app.draw()
        await pilot.pause()
        assert isinstance(app.screen, FleetScreen)
        assert "2 of 9 calls" in progress_line(app)


@pytest.mark.parametrize(("key", "left"), [("q", Left.BY_KEY), ("ctrl+c", Left.INTERRUPTED)])
async def test_how_the_view_was_left(tmp_path: Path, key: str, left: Left) -> None:
    app = demo_app(tmp_path, ["none yet"])
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await pilot.press(key)
        await pilot.pause()
        assert not app.is_running
    assert app.left is left


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0


@pytest.mark.parametrize(("foreground", "shown"), [(True, True), (False, False)])
def test_a_demo_in_the_background_draws_nothing(
    monkeypatch: pytest.MonkeyPatch, foreground: bool, shown: bool
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stdout", Terminal())
    group = os.getpgrp() if foreground else os.getpgrp() + 1
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: group)
    assert _has_terminal() is shown
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert not _has_terminal()
