"""The application: every key does what the help says, sizes, and nodes that go and come back.

Of two sizes at once the latest counts. A node may end, restart its engine, or answer slowly.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from fake_node import FakeNode
from recorded_node import feed, node_screen, page, recorded, status_with, table, text
from textual import events
from textual.geometry import Size
from textual.pilot import Pilot
from textual.widgets import ContentSwitcher, Static

from hisparsed.tui import updates
from hisparsed.tui.app import NodeScreen, TopApp
from hisparsed.tui.client import NodeClient
from hisparsed.tui.dialogs import ChoiceDialog, ConfirmDialog, DetailDialog
from hisparsed.tui.feed import LiveFeed, NodeSession
from hisparsed.tui.model import NodeModel
from hisparsed.tui.options import parse_address
from hisparsed.tui.pages import DecisionsPage, RequestsPage
from hisparsed.tui.views.requests import column_widths
from hisparsed.tui.widgets import LinesView, SearchLine

Make = Callable[..., TopApp]


@pytest.mark.parametrize(
    ("key", "name"),
    [("1", "overview"), ("2", "decisions"), ("3", "requests"), ("4", "policy"), ("5", "logs")],
)
async def test_digits_choose_a_page(make_app: Make, key: str, name: str) -> None:
    async with make_app().run_test(size=(100, 30)) as pilot:
        await pilot.press(key)
        await pilot.pause()
        assert pilot.app.screen.query_one(ContentSwitcher).current == name
        assert f"[{key} " in text(pilot, "#tabs")


async def test_a_click_on_a_tab_chooses_its_page(make_app: Make) -> None:
    async with make_app().run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        await pilot.click("#tabs", offset=(text(pilot, "#tabs").index("4 Policy"), 0))
        await pilot.pause()
        assert node_screen(pilot).page.id == "policy"


async def test_q_leaves(make_app: Make) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("q")
    assert not app.is_running


async def test_question_mark_explains_every_key(make_app: Make) -> None:
    async with make_app().run_test(size=(120, 60)) as pilot:
        await pilot.press("question_mark")
        await pilot.pause()
        assert isinstance(pilot.app.screen, DetailDialog)
        shown = text(pilot, "#detail")
        for word in ("pause", "command palette", "freeze or thaw", "recorded journal", "symbols"):
            assert word in shown
        await pilot.press("escape")
        assert isinstance(pilot.app.screen, NodeScreen)


async def test_pause_freezes_tables_and_not_the_clock(make_app: Make) -> None:
    app = make_app()
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("2", "p")
        await pilot.pause()
        assert "PAUSED since" in text(pilot, "#header")
        rows, now_s = len(table(pilot).keys), app.sessions[0].model.node_time_s
        assert now_s is not None
        first = recorded("decisions")["decisions"][0]
        move = {**first, "acts": True, "sequence": 9_999, "at_unix_s": now_s + 1}
        feed(pilot).say(updates.DecisionUpdate([move]))
        app._clock = lambda: now_s + 61
        app.draw()
        await pilot.pause()
        assert len(table(pilot).keys) == rows
        assert "20:16:36" in text(pilot, "#header")
        await pilot.press("p")
        await pilot.pause()
        assert len(table(pilot).keys) == rows + 1
        assert "PAUSED" not in text(pilot, "#header")


async def test_w_shows_another_time(make_app: Make) -> None:
    async with make_app().run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        for words in ("20:10  +5m  +20:15", "20:00  +15m", "19:15  +1h", "18:15  +2h", "20:10"):
            assert re.search(words, text(pilot, "#overview-lines"))
            await pilot.press("w")
            await pilot.pause()


async def test_t_goes_through_the_themes(make_app: Make) -> None:
    async with make_app().run_test(size=(80, 24)) as pilot:
        seen = []
        for _ in range(3):
            seen.append(pilot.app.theme)
            await pilot.press("T")
        assert seen == ["dark", "light", "colour-blind"]
        assert pilot.app.theme == "dark"


async def test_l_and_c_filter_decisions(make_app: Make) -> None:
    async with make_app().run_test(size=(100, 30)) as pilot:
        await pilot.press("2", "l")
        assert page(pilot, DecisionsPage).filter.lever == "split"
        await pilot.press("l")
        assert page(pilot, DecisionsPage).filter.lever == "multiplier"
        assert {key[2] for key in table(pilot).keys} == {"multiplier"}
        await pilot.press("c")
        await pilot.pause()
        assert isinstance(pilot.app.screen, ChoiceDialog)
        await pilot.press("down", "enter")
        await pilot.pause()
        code = page(pilot, DecisionsPage).filter.code
        assert code is not None
        assert code in text(pilot, "#decisions-summary")
        await pilot.press("c")
        await pilot.pause()
        await pilot.press("escape")
        await pilot.pause()
        assert page(pilot, DecisionsPage).filter.code == code


async def test_a_asks_for_every_tick(make_app: Make) -> None:
    async with make_app().run_test(size=(100, 30)) as pilot:
        await pilot.press("2", "l", "a")
        await pilot.pause()
        assert ("decisions", "split", None) in feed(pilot).asked
        assert "every tick" in text(pilot, "#decisions-summary")


async def test_enter_opens_the_whole_decision(make_app: Make) -> None:
    tick = recorded("tick")
    async with make_app().run_test(size=(120, 60)) as pilot:
        await pilot.press("2")
        await pilot.pause()
        place = next(at for at, key in enumerate(table(pilot).keys) if key[1] == tick["sequence"])
        await pilot.press(*["down"] * place, "enter")
        await pilot.pause()
        shown = text(pilot, "#detail")
        assert "\nfigures\n" in shown
        assert "confirmed by the next report" in shown
        assert "snapshot" in shown
        assert "geometry.block_tokens" in shown


async def test_a_decision_without_its_snapshot_is_still_shown(make_app: Make) -> None:
    async with make_app().run_test(size=(120, 60)) as pilot:
        await pilot.press("2", "l", "enter")
        await pilot.pause()
        shown = text(pilot, "#detail")
        assert "the snapshot is not available: the journal holds no such tick" in shown
        assert "\nfigures\n" in shown


async def test_an_event_opens_too(make_app: Make) -> None:
    async with make_app().run_test(size=(120, 60)) as pilot:
        await pilot.press("2", "slash", *"frozen", "enter")
        await pilot.pause()
        await pilot.press("enter")
        await pilot.pause()
        assert "ada froze watermark." in text(pilot, "#detail")


async def test_s_and_r_sort_requests(make_app: Make) -> None:
    async with make_app().run_test(size=(100, 30)) as pilot:
        await pilot.press("3")
        requests = page(pilot, RequestsPage)
        assert feed(pilot).asked[-1] == "requests"
        assert feed(pilot).want_requests
        assert (requests.order.column, requests.order.descending) == ("age", True)
        ages = {one["request_id"]: one["age_s"] for one in recorded("requests")["rows"]}
        shown = [ages[key] for key in table(pilot).keys]
        assert shown == sorted(shown, reverse=True)
        await pilot.press("r")
        shown = [ages[key] for key in table(pilot).keys]
        assert shown == sorted(shown)
        await pilot.press("s")
        assert requests.order.column == "request"
        await pilot.press("1")
        assert not feed(pilot).want_requests


async def test_a_click_on_a_title_sorts_by_it(make_app: Make) -> None:
    async with make_app().run_test(size=(120, 40)) as pilot:
        await pilot.press("3")
        await pilot.pause()
        for descending in (True, False):
            await pilot.click("#requests-table", offset=(sum(column_widths(120)[:2]) + 4, 0))
            await pilot.pause()
            order = page(pilot, RequestsPage).order
            assert (order.column, order.descending) == ("context", descending)


async def test_enter_and_a_second_click_open_a_request_without_text_of_its_prompt(
    make_app: Make,
) -> None:
    async with make_app().run_test(size=(100, 30)) as pilot:
        await pilot.press("3", "enter")
        await pilot.pause()
        assert "1,174 tokens, 1,173 of them computed" in " ".join(text(pilot, "#detail").split())
        await pilot.press("escape")
        await pilot.click("#requests-table", offset=(5, 3))
        await pilot.pause()
        assert table(pilot).cursor_key == table(pilot).keys[2]
        await pilot.click("#requests-table", offset=(5, 3))
        await pilot.pause()
        assert isinstance(pilot.app.screen, DetailDialog)


async def test_the_cursor_stays_on_its_row(make_app: Make) -> None:
    async with make_app().run_test(size=(100, 30)) as pilot:
        await pilot.press("3", "down", "down", "j", "k")
        key = table(pilot).cursor_key
        assert key == table(pilot).keys[2]
        await pilot.press("r")
        assert table(pilot).cursor_key == key
        await pilot.press("end")
        assert table(pilot).cursor_key == table(pilot).keys[-1]
        await pilot.press("g")
        assert table(pilot).cursor_key == table(pilot).keys[0]
        await pilot.press("pagedown", "pageup", "G", "home")
        assert table(pilot).cursor_key == table(pilot).keys[0]


@pytest.mark.parametrize("key", ["2", "3", "4"])
async def test_search_narrows_a_table_and_escape_ends_it(make_app: Make, key: str) -> None:
    async with make_app().run_test(size=(100, 30)) as pilot:
        await pilot.press(key)
        await pilot.pause()
        everything = len(table(pilot).keys)
        await pilot.press("slash", *"zz")
        await pilot.pause()
        assert len(table(pilot).keys) == 0
        await pilot.press("escape")
        await pilot.pause()
        assert len(table(pilot).keys) == everything
        assert not pilot.app.screen.query_one(SearchLine).display


async def test_enter_keeps_a_search_until_the_page_is_left(make_app: Make) -> None:
    async with make_app().run_test(size=(100, 30)) as pilot:
        await pilot.press("4", "slash", *"hot.", "enter")
        await pilot.pause()
        assert {str(key)[:4] for key in table(pilot).keys} == {"hot."}
        await pilot.press("1", "4")
        await pilot.pause()
        assert len(table(pilot).keys) > 30


async def test_the_palette_offers_every_page(make_app: Make) -> None:
    app = make_app()
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        titles = [one.title for one in app.get_system_commands(app.screen)]
        assert {"Overview", "Decisions", "Requests", "Policy", "Logs & health", "Quit"} <= {*titles}
        await pilot.press("ctrl+p", *"Requests", "down", "enter")
        await pilot.pause()
        await pilot.pause()
        assert node_screen(pilot).page.id == "requests"


async def test_the_palette_offers_the_keys_of_the_page(make_app: Make) -> None:
    app = make_app()
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("5")
        await pilot.pause()
        commands = {one.title: one for one in app.get_system_commands(app.screen)}
        assert {"Level", "Source", "Doctor", "Look again"} <= commands.keys()
        assert "Reload" not in commands
        commands["Doctor"].callback()
        await pilot.pause()
        await pilot.pause()
        assert isinstance(app.screen, DetailDialog)


@pytest.mark.parametrize("size", [(79, 24), (80, 23), (20, 5)])
async def test_a_terminal_that_is_too_small_says_so(make_app: Make, size: tuple[int, int]) -> None:
    async with make_app().run_test(size=size) as pilot:
        await pilot.pause()
        assert f"{size[0]}x{size[1]} is too small." in text(pilot, "#too-small")
        await pilot.resize_terminal(80, 24)
        await pilot.pause()
        assert not pilot.app.screen.query_one("#too-small").display
        assert "host memory" in text(pilot, "#overview-lines")


async def test_player_keys_do_nothing_on_a_running_node(make_app: Make) -> None:
    async with make_app().run_test(size=(80, 24)) as pilot:
        before = text(pilot, "#overview-lines")
        await pilot.press("space", "plus", "minus", "left", "right")
        await pilot.pause()
        assert text(pilot, "#overview-lines") == before


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
            assert len(laid_out) < 20, laid_out  # or it would continue forever
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


@asynccontextmanager
async def showing(node: FakeNode) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    now_s = recorded("status")["at_unix_s"]
    async with NodeClient(parse_address(f"n={node.path}")) as client:
        model = NodeModel("n", str(node.path))

        async def pause(_: float) -> None:
            await asyncio.sleep(0.02)

        session = NodeSession(model, lambda tell: LiveFeed(client, tell, sleep=pause), client)
        app = TopApp([session], clock=lambda: now_s)
        async with app.run_test(size=(120, 40)) as pilot:
            yield app, pilot


async def until(app: TopApp, pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            app.draw()
            await pilot.pause(0.02)


def shown(app: TopApp, selector: str) -> str:
    return "\n".join(one.plain for one in app.screen.query_one(selector, LinesView).lines)


def figures(app: TopApp) -> str:
    """The panels of the overview: what is below its words and above its charts."""
    words = shown(app, "#overview-lines")
    return words[words.index("host memory 44") : words.index("calls waiting")]


async def test_a_daemon_killed_and_restarted_is_shown_so(node: FakeNode) -> None:
    async with showing(node) as (app, pilot):
        await until(app, pilot, lambda: "host memory" in shown(app, "#overview-lines"))
        await until(app, pilot, lambda: "first token -" not in shown(app, "#overview-lines"))
        await until(app, pilot, lambda: app.sessions[0].model.policy is not None)
        before = figures(app)
        await node.stop()
        await until(app, pilot, lambda: "disconnected since" in shown(app, "#header"))
        assert figures(app) == before
        assert "NOT KNOWN since" in shown(app, "#overview-lines")
        assert app.screen.query_one("#overview-lines", LinesView)._stale
        await pilot.press("2", "3", "4", "5", "1")
        await node.start()
        await until(app, pilot, lambda: "report " in shown(app, "#header"))
        assert "disconnected" not in shown(app, "#header")
        assert not app.screen.query_one("#overview-lines", LinesView)._stale


async def test_an_engine_that_restarts_leaves_gaps_and_no_crash(node: FakeNode) -> None:
    async with showing(node) as (app, pilot):
        await until(app, pilot, lambda: "host memory" in shown(app, "#overview-lines"))
        node.send("status", status_with({"lifecycle": "starting", "observed": None, "levers": []}))
        await until(app, pilot, lambda: "has not reported yet" in shown(app, "#header"))
        for key in "23451":
            await pilot.press(key)
        at = recorded("status")["at_unix_s"]
        counters = {
            "observed.tokens.generated_total": 0,
            "observed.hot.loads_total": 0,
            "at_unix_s": at + 2,
        }
        node.send("status", status_with(counters))
        await until(app, pilot, lambda: "report " in shown(app, "#header"))
        history = app.sessions[0].model.history
        assert history.buckets("tokens", 2, 1, end_s=at + 2) == [None]


async def test_a_slow_node_never_holds_the_keys_up(node: FakeNode) -> None:
    node.open.clear()
    async with showing(node) as (app, pilot):
        await pilot.press("3", "question_mark", "escape", "5", "p")
        assert "connecting to" in shown(app, "#header")
        assert "PAUSED" in shown(app, "#header")
        node.open.set()
        await until(app, pilot, lambda: app.sessions[0].model.status is not None)


@pytest.mark.parametrize("key", "12345")
async def test_one_key_freezes_everything_from_every_page(node: FakeNode, key: str) -> None:
    async with showing(node) as (app, pilot):
        await until(app, pilot, lambda: app.sessions[0].model.status is not None)
        await pilot.press(key, "Z")
        await pilot.pause()
        assert isinstance(app.screen, ConfirmDialog)
        assert node.posts == [], "it asks first"
        await pilot.press("y")
        await until(app, pilot, lambda: bool(node.posts))
        path, body = node.posts[0]
        assert path == "/v1/freeze"
        assert body["levers"] == ["split", "multiplier", "admission", "watermark"]


async def test_what_is_all_frozen_is_thawed_by_the_same_key(node: FakeNode) -> None:
    levers = ["split", "multiplier", "admission", "watermark"]
    node.answers["status"] = status_with({"policy.frozen": levers})
    async with showing(node) as (app, pilot):
        await until(app, pilot, lambda: app.sessions[0].model.status is not None)
        await pilot.press("Z", "y")
        await until(app, pilot, lambda: bool(node.posts))
        assert node.posts[0][0] == "/v1/thaw"


async def test_the_policy_page_explains_the_key_under_the_cursor(make_app: Make) -> None:
    async with make_app().run_test(size=(80, 24)) as pilot:
        await pilot.press("4", "j")
        await pilot.pause()
        assert text(pilot, "#policy-key").splitlines() == [
            "tick  time (at least 50ms); default 1s; takes effect: live",
            "Time between two decisions.",
        ]


async def test_the_dialog_says_what_may_be_set(node: FakeNode) -> None:
    async with showing(node) as (app, pilot):
        await until(app, pilot, lambda: app.sessions[0].model.keys is not None)
        await until(app, pilot, lambda: app.sessions[0].model.policy is not None)
        await pilot.press("4", "j", "e")
        await pilot.pause()
        said = "\n".join(str(one.content) for one in app.screen.query(Static))
        assert "tick  time (at least 50ms); default 1s; takes effect: live" in said
        assert "Time between two decisions." in said


async def test_a_row_of_the_journal_is_whole_below_the_table(make_app: Make) -> None:
    async with make_app().run_test(size=(80, 24)) as pilot:
        await pilot.press("2", "j", "j", "j", "j")
        await pilot.pause()
        said = " ".join(text(pilot, "#decision-words").split())
        assert "so waiting requests wait for computation, not for blocks." in said
        assert "held since 20:14:21 for changing reasons: NotKVPressure 5x" in said
