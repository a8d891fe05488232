"""Sizes of the terminal: the latest counts, however fast they come."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from textual import events
from textual.geometry import Size
from textual.pilot import Pilot

from hisparsed.tui.app import TopApp
from hisparsed.tui.screens.node_screen import NodeScreen

Make = Callable[..., TopApp]


async def storm(pilot: Pilot[None], *sizes: Size) -> None:
    """All of them are in the queue of the screen before it takes the first."""
    for size in sizes:
        pilot.app.screen.post_message(events.Resize(size, size))
        # Of several sizes in a row only the last is taken; what comes between keeps them apart.
        pilot.app.screen.call_later(lambda: None)
    for _ in range(10):
        await pilot.pause()


@pytest.mark.parametrize("key", ["1", "question_mark", "ctrl+p"], ids=["page", "dialog", "palette"])
async def test_two_sizes_at_once_are_not_laid_out_in_turn_for_ever(
    make_app: Make, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    app = make_app()
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press(key)
        laid_out: list[Size] = []
        kind = type(app.screen)
        before = kind._screen_resized

        def counting(self: NodeScreen, size: Size) -> None:
            laid_out.append(size)
            assert len(laid_out) < 20, laid_out  # or it would go on for ever
            before(self, size)

        monkeypatch.setattr(kind, "_screen_resized", counting)
        await storm(pilot, Size(90, 28), Size(70, 20), Size(90, 28), Size(100, 30))
        assert set(laid_out) == {Size(100, 30)}
        assert app.screen.size == Size(100, 30)


async def test_what_is_too_small_says_so_until_it_is_not(make_app: Make) -> None:
    app = make_app()
    async with app.run_test(size=(100, 30)) as pilot:
        for size, small in (((70, 20), True), ((60, 30), True), ((80, 24), False)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            assert app.screen.has_class("small") is small


async def test_the_clock_goes_on_behind_a_dialog(make_app: Make) -> None:
    app = make_app()
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("question_mark")
        await pilot.pause()
        page = app.screen_stack[-2]
        assert isinstance(page, NodeScreen)
        before = str(page.query_one("#header").lines[0].plain)  # type: ignore[attr-defined]
        now_s = app._clock()
        app._clock = lambda: now_s + 61
        app.draw()
        assert page.query_one("#header").lines[0].plain != before  # type: ignore[attr-defined]
