"""docs/compatibility.md says what the table and the snapshots say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hisparsed.engine.compat.page import page
from hisparsed.engine.compat.surface import Place
from hisparsed.engine.compat.touch import How
from hisparsed.engine.compat.touched import all_touched
from hisparsed.engine.compat.versions import TESTED

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"


def test_the_page_is_current(snapshot: Callable[[str], dict[str, Place]]) -> None:
    current = page(all_touched(), {version: snapshot(version) for version in TESTED})

    assert DOCUMENT.read_text(encoding="utf-8") == current, "`make compatibility` writes it anew"


def test_every_private_member_is_listed_with_its_reason() -> None:
    listed = DOCUMENT.read_text(encoding="utf-8").partition("## Private names")[2]
    listed = listed.partition("## All names")[0]

    for touch in all_touched():
        names = [use.name for use in touch.uses if use.how is not How.TEXT]
        private = [name for name in names if name.startswith("_") and not name.startswith("__")]
        if private:
            (line,) = [
                line
                for line in listed.splitlines()
                if f"`{touch.target}`" in line and f"| {touch.why} | {touch.breaks} |" in line
            ]
            assert [name for name in private if f"`{name}`" not in line] == []
