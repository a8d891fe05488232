"""docs/commands.md is what the commands print."""

from __future__ import annotations

from pathlib import Path

from tests.bench.command_docs import document

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def test_the_page_of_commands_is_current() -> None:
    assert PAGE.read_text("utf-8") == document(), (
        "run `python -m tests.bench.command_docs > docs/commands.md`"
    )
