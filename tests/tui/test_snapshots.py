"""What the pages look like, as SVG: three sizes, three themes, without colour, in ASCII.

``HISPARSED_UPDATE_SNAPSHOTS=1`` writes them anew; look at what changed before you keep them.
"""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from hisparsed.tui import updates
from hisparsed.tui.app import TopApp

FOLDER = Path(__file__).parent / "snapshots"
Make = Callable[..., TopApp]

SIZES = ((80, 24), (120, 40), (200, 60))
THEMES = ("dark", "light", "colour-blind")
PAGES = {"2": "decisions", "3": "requests", "4": "policy", "5": "logs"}


async def pictures(app: TopApp, size: tuple[int, int], *keys: str) -> AsyncGenerator[str, None]:
    """One of the first page, then one after each key: an application starts slowly."""
    async with app.run_test(size=size) as pilot:
        for key in ("", *keys):
            await pilot.pause()
            if key:
                await pilot.press(key)
                await pilot.pause()
            app.draw()
            await pilot.pause()
            yield app.export_screenshot(title="hisparsed top", simplify=True)


async def picture(app: TopApp, size: tuple[int, int]) -> str:
    (found,) = [one async for one in pictures(app, size)]
    return found


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
async def test_overview_in_every_theme(
    make_app: Make, tmp_path: Path, size: tuple[int, int]
) -> None:
    found = pictures(make_app(theme=THEMES[0]), size, *"T" * (len(THEMES) - 1))
    for theme in THEMES:
        compare(f"overview-{size[0]}x{size[1]}-{theme}", await anext(found), tmp_path)
    await found.aclose()


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_pages(make_app: Make, tmp_path: Path, size: tuple[int, int]) -> None:
    found = pictures(make_app(), size, *PAGES)
    await anext(found)
    for name in PAGES.values():
        compare(f"{name}-{size[0]}x{size[1]}", await anext(found), tmp_path)
    await found.aclose()


async def test_fleet(make_app: Make, tmp_path: Path) -> None:
    app = make_app("gpu-1", "gpu-2")
    app.sessions[1].model.apply(updates.Lost("gone"), 1_700_000_000)
    compare("fleet-120x40", await picture(app, (120, 40)), tmp_path)


async def test_disconnected(make_app: Make, tmp_path: Path) -> None:
    app = make_app()
    app.sessions[0].model.apply(updates.Lost("gone"), 1_700_000_000)
    compare("disconnected-80x24", await picture(app, (80, 24)), tmp_path)


async def test_ascii_uses_nothing_else(make_app: Make, tmp_path: Path) -> None:
    found = [one async for one in pictures(make_app(ascii_only=True), (120, 40), *PAGES)]
    compare("overview-120x40-ascii", found[0], tmp_path)
    assert len(found) == 5
    for page in found:
        assert "".join(words(page)).replace("&#160;", " ").isascii()


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
