"""What the pages look like, as SVG: three sizes in three themes, without colour, in ASCII.

Dialogs, a recorded journal, and a node that was never reached, at the three sizes too.

``HISPARSED_UPDATE_SNAPSHOTS=1`` writes them again; look at the changes before you keep them.
"""

from __future__ import annotations

import json
import lzma
import os
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from fake_node import FakeNode
from recorded_journal import write_journal
from recorded_node import RecordedFeed, recorded_model
from textual.pilot import Pilot
from textual.widgets import Input

from hisparsed.tui import updates
from hisparsed.tui.app import TopApp
from hisparsed.tui.client import NodeClient
from hisparsed.tui.feed import NodeSession, journal_session
from hisparsed.tui.journal_reader import JournalReader
from hisparsed.tui.model import NodeModel
from hisparsed.tui.options import parse_address

FOLDER = Path(__file__).parent / "snapshots"
README_PICTURE = Path(__file__).parents[2] / "docs" / "images" / "top.svg"
Make = Callable[..., TopApp]
Pictures = dict[str, str]
"""By theme."""

SIZES = ((80, 24), (120, 40), (200, 60))
THEMES = ("dark", "light", "colour-blind")
PAGES = {"1": "overview", "2": "decisions", "3": "requests", "4": "policy", "5": "logs"}
every_size = pytest.mark.parametrize(
    "size",
    [
        pytest.param(
            size, marks=() if size == SIZES[0] else pytest.mark.long, id="x".join(map(str, size))
        )
        for size in SIZES
    ],
)


async def picture(pilot: Pilot[None]) -> str:
    await pilot.pause()
    pilot.app.draw()  # type: ignore[attr-defined]
    await pilot.pause()
    return pilot.app.export_screenshot(title="hisparsed top", simplify=True)


async def pictures(pilot: Pilot[None]) -> Pictures:
    """What is on the screen, in every theme."""
    found = {}
    for theme in THEMES:
        pilot.app.theme = theme
        found[theme] = await picture(pilot)
    return found


def compare(name: str, found: Pictures, tmp_path: Path) -> None:
    """All themes are in one file: they share their words, and so most of what it takes."""
    path = FOLDER / f"{name}.json.xz"
    if os.environ.get("HISPARSED_UPDATE_SNAPSHOTS"):
        FOLDER.mkdir(exist_ok=True)
        path.write_bytes(lzma.compress(json.dumps(found).encode()))
    wanted = json.loads(lzma.decompress(path.read_bytes()))
    assert wanted.keys() == found.keys()
    for theme, svg in found.items():
        if svg != wanted[theme]:
            new = tmp_path / f"{name}-{theme}.svg"
            new.write_text(svg, encoding="utf-8")
            pairs = zip(words(wanted[theme]), words(svg), strict=False)
            changed = [(old, now) for old, now in pairs if old != now]
            pytest.fail(f"{name} looks different, see {new}; first words: {changed[:5]}")


def words(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>(.*?)</text>", svg)


@every_size
async def test_pages_in_every_theme(make_app: Make, tmp_path: Path, size: tuple[int, int]) -> None:
    async with make_app().run_test(size=size) as pilot:
        for key, name in PAGES.items():
            await pilot.press(key)
            found = await pictures(pilot)
            assert len(set(found.values())) == len(THEMES)
            compare(f"{name}-{size[0]}x{size[1]}", found, tmp_path)


async def test_the_picture_of_the_readme(make_app: Make) -> None:
    """``HISPARSED_UPDATE_SNAPSHOTS=1 python -m pytest -k picture_of_the_readme`` writes it."""
    async with make_app("gpu-1").run_test(size=(120, 40)) as pilot:
        found = await picture(pilot)
    if os.environ.get("HISPARSED_UPDATE_SNAPSHOTS"):
        README_PICTURE.write_text(found, encoding="utf-8")
    assert README_PICTURE.read_text("utf-8") == found


@every_size
async def test_the_fleet_in_every_theme(
    make_app: Make, tmp_path: Path, size: tuple[int, int]
) -> None:
    app = make_app("gpu-1", "gpu-2")
    app.sessions[1].model.apply(updates.Lost("gone"), 1_700_000_000)
    async with app.run_test(size=size) as pilot:
        compare(f"fleet-{size[0]}x{size[1]}", await pictures(pilot), tmp_path)


# The keys that open each dialog: first the page's.
DIALOGS = {
    "decision": ("2", "j", "j", "j", "j", "enter"),
    "request": ("3", "enter"),
    "set-value": ("4", "j", "e"),
    "freeze-all": ("1", "Z"),
    "doctor": ("5", "d"),
    "help": ("1", "question_mark"),
}


@every_size
async def test_dialogs(
    node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    monkeypatch.setattr(Input, "cursor_blink", False)
    address = parse_address(f"gpu-7={node.path}")
    async with NodeClient(address) as client:
        model = recorded_model("gpu-7")
        session = NodeSession(model, RecordedFeed, client=client)
        app = TopApp([session], clock=lambda: model.node_time_s or 0.0)
        async with app.run_test(size=size) as pilot:
            for name, keys in DIALOGS.items():
                await pilot.press(*keys)
                found = {"dark": await picture(pilot)}
                compare(f"{name}-{size[0]}x{size[1]}", found, tmp_path)
                await pilot.press("escape")


@every_size
async def test_a_recorded_journal(tmp_path: Path, size: tuple[int, int]) -> None:
    write_journal(tmp_path / "node-7.sqlite")
    with closing(JournalReader(tmp_path / "node-7.sqlite")) as reader:
        async with TopApp([journal_session(reader, "node-7")]).run_test(size=size) as pilot:
            await pilot.pause()
            compare(f"journal-{size[0]}x{size[1]}", {"dark": await picture(pilot)}, tmp_path)


@every_size
async def test_never_reached(tmp_path: Path, size: tuple[int, int]) -> None:
    model = NodeModel("n", "/run/n/control.sock")
    why = "no daemon has this socket; it is stopped or has another control_socket"
    model.apply(updates.Lost(f"/run/n/control.sock: {why}"), 1_700_000_000)
    app = TopApp([NodeSession(model, RecordedFeed)], clock=lambda: 1_700_000_060)
    async with app.run_test(size=size) as pilot:
        compare(f"never-reached-{size[0]}x{size[1]}", {"dark": await picture(pilot)}, tmp_path)


async def test_disconnected(make_app: Make, tmp_path: Path) -> None:
    app = make_app()
    app.sessions[0].model.apply(updates.Lost("gone"), 1_700_000_000)
    async with app.run_test(size=(80, 24)) as pilot:
        compare("disconnected-80x24", await pictures(pilot), tmp_path)


async def test_ascii_uses_nothing_else(make_app: Make, tmp_path: Path) -> None:
    async with make_app(ascii_only=True).run_test(size=(120, 40)) as pilot:
        for key, name in PAGES.items():
            await pilot.press(key)
            found = await picture(pilot)
            assert "".join(words(found)).replace("&#160;", " ").isascii()
            if name == "overview":
                compare("overview-120x40-ascii", {"dark": found}, tmp_path)
        await pilot.press("ctrl+p")
        for _ in range(20):
            await pilot.pause()
        found = await picture(pilot)
        assert "Logs&#160;&amp;&#160;health" in found
        assert "".join(words(found)).replace("&#160;", " ").isascii()


async def test_without_colour_there_is_none(
    make_app: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with make_app(no_color=True).run_test(size=(80, 24)) as pilot:
        found = await picture(pilot)
    compare("overview-80x24-mono", {"mono": found}, tmp_path)
    styles = "".join(re.findall(r"\.terminal-\d+-r\d+ \{[^}]*\}", found))
    colours = set(re.findall(r"#([0-9a-f]{6})", styles))
    for colour in colours:
        red, green, blue = (int(colour[at : at + 2], 16) for at in (0, 2, 4))
        assert max(red, green, blue) - min(red, green, blue) <= 3, colour
