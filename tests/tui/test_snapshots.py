"""What the pages look like, as SVG: three sizes, three themes, without colour, in ASCII.

``HISPARSED_UPDATE_SNAPSHOTS=1`` writes them anew; look at what changed before you keep them.
"""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hisparsed.tui import updates
from hisparsed.tui.app import TopApp

FOLDER = Path(__file__).parent / "snapshots"
Make = Callable[..., TopApp]

SIZES = ((80, 24), (120, 40), (200, 60))
THEMES = ("dark", "light", "colour-blind")
PAGES = {"2": "decisions", "3": "requests", "4": "policy", "5": "logs"}


async def picture(app: TopApp, size: tuple[int, int], *keys: str) -> str:
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        await pilot.press(*keys)
        await pilot.pause()
        app.draw()
        await pilot.pause()
        return app.export_screenshot(title="hisparsed top", simplify=True)


def compare(name: str, found: str, tmp_path: Path) -> None:
    path = FOLDER / f"{name}.svg.gz"
    if os.environ.get("HISPARSED_UPDATE_SNAPSHOTS"):
        FOLDER.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(found.encode(), mtime=0))
    wanted = gzip.decompress(path.read_bytes()).decode()
    if found == wanted:
        return
    (tmp_path / f"{name}.svg").write_text(found, encoding="utf-8")
    changed = [
        (old, new) for old, new in zip(words(wanted), words(found), strict=False) if old != new
    ]
    pytest.fail(f"{name} looks different, see {tmp_path / name}.svg; first words: {changed[:5]}")


def words(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>(.*?)</text>", svg)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("theme", THEMES)
async def test_overview(make_app: Make, tmp_path: Path, theme: str, size: tuple[int, int]) -> None:
    found = await picture(make_app(theme=theme), size)
    compare(f"overview-{size[0]}x{size[1]}-{theme}", found, tmp_path)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("key", PAGES)
async def test_pages(make_app: Make, tmp_path: Path, key: str, size: tuple[int, int]) -> None:
    compare(f"{PAGES[key]}-{size[0]}x{size[1]}", await picture(make_app(), size, key), tmp_path)


async def test_fleet(make_app: Make, tmp_path: Path) -> None:
    app = make_app("gpu-1", "gpu-2")
    app.sessions[1].model.apply(updates.Lost("gone"), 1_700_000_000)
    compare("fleet-120x40", await picture(app, (120, 40)), tmp_path)


async def test_disconnected(make_app: Make, tmp_path: Path) -> None:
    app = make_app()
    app.sessions[0].model.apply(updates.Lost("gone"), 1_700_000_000)
    compare("disconnected-80x24", await picture(app, (80, 24)), tmp_path)


async def test_ascii_uses_nothing_else(make_app: Make, tmp_path: Path) -> None:
    app = make_app(ascii_only=True)
    found = await picture(app, (120, 40))
    compare("overview-120x40-ascii", found, tmp_path)
    assert "".join(words(found)).replace("&#160;", " ").isascii()


@pytest.mark.parametrize("key", PAGES)
async def test_every_page_keeps_to_ascii(make_app: Make, key: str) -> None:
    found = await picture(make_app(ascii_only=True), (120, 40), key)
    assert "".join(words(found)).replace("&#160;", " ").isascii()


async def test_without_colour_there_is_none(
    make_app: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    found = await picture(make_app(no_color=True), (80, 24))
    compare("overview-80x24-mono", found, tmp_path)
    styles = "".join(re.findall(r"\.terminal-\d+-r\d+ \{[^}]*\}", found))
    colours = set(re.findall(r"#([0-9a-f]{6})", styles))
    for colour in colours:
        red, green, blue = (int(colour[at : at + 2], 16) for at in (0, 2, 4))
        assert max(red, green, blue) - min(red, green, blue) <= 3, colour
