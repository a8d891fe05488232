"""Changes: each asks first and says what will happen; none is possible where it must not be."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from recorded_node import RecordedFeed, recorded_model, status_with
from textual.pilot import Pilot
from textual.widgets import Input, Static

from hisparsed.tui import changes, updates
from hisparsed.tui.app import NodeScreen, TopApp
from hisparsed.tui.client import NodeClient
from hisparsed.tui.dialogs import ConfirmDialog, ValueDialog
from hisparsed.tui.feed import NodeSession
from hisparsed.tui.model import NodeModel
from hisparsed.tui.options import parse_address


@dataclass
class Node:
    """Takes changes; ``answer`` is what it says to them."""

    answer: httpx.Response = field(default_factory=lambda: httpx.Response(200, json={}))
    posts: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.posts.append((request.url.path, json.loads(request.content)))
        return self.answer

    def app(self, **options: Any) -> TopApp:
        client = NodeClient(
            parse_address("http://node:1"), transport=httpx.MockTransport(self.handle)
        )
        model = recorded_model()
        now_s = model.node_time_s or 0.0
        session = NodeSession(model, RecordedFeed, client=client)
        return TopApp([session], clock=lambda: now_s, **options)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    return Node()


def words(pilot: Pilot[None]) -> str:
    dialog = pilot.app.screen
    assert isinstance(dialog, ConfirmDialog)
    return "\n".join(str(one.render()) for one in dialog.query(Static))


def notices(app: TopApp) -> list[str]:
    return [one.message for one in app._notifications]


TYPED = frozenset("fr_low7%10")
UNTIL_UNSET = [*"until", "space", *"unset"]
SIZE = (80, 24)
KEYS = {
    "reload": (["R"], "/v1/policy/reload", {}),
    "freeze": (["z", "enter"], "/v1/freeze", {"levers": ["split"]}),
    "thaw": (["z", "end", "enter"], "/v1/thaw", {"levers": ["watermark"]}),
    "mode": (
        ["m", "down", "enter", "down", "enter"],
        "/v1/mode",
        {"levers": ["multiplier"], "mode": "advise"},
    ),
    "mode of the document": (
        ["m", "enter", "end", "enter"],
        "/v1/mode",
        {"levers": ["split"], "mode": None},
    ),
    "set": (
        ["slash", *"free_l", "enter", "e", *"7%", "enter", *"10m", "enter"],
        "/v1/policy/set",
        {"key": "hot.free_low", "value": "7%", "for_s": 600.0},
    ),
    "set until unset": (
        ["slash", *"free_l", "enter", "enter", *"7%", "enter", *UNTIL_UNSET, "enter"],
        "/v1/policy/set",
        {"key": "hot.free_low", "value": "7%", "for_s": None},
    ),
    "unset": (
        ["slash", *"hot.st", "enter", "down", "u"],
        "/v1/policy/unset",
        {"key": "hot.step"},
    ),
    "doctor": (["5", "D"], "/v1/doctor/run", {}),
}
SAYS = {
    "reload": "The node reads /etc/hisparsed/policy.yaml again",
    "freeze": "split stays at 704",
    "thaw": "watermark may move again from the next tick",
    "mode": "multiplier is still decided and explained",
    "mode of the document": "split goes back to the mode that the policy document says",
    "set": "hot.free_low goes from 10% to 7% from the next tick, for 10m00s",
    "set until unset": "until it is unset; it survives reloads",
    "unset": "hot.step goes back to the value of the policy document",
    "doctor": "The node looks at what can change while it runs",
}
EVERY = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("reload", "mode", "set") else pytest.mark.long)
        for name in KEYS
    ],
)
"""Three of them are quick to try: without a question, by a list, by a typed value."""
NOT_OF_A_POLICY = ("doctor",)
"""Sent without the policy generation that was seen."""


async def act(pilot: Pilot[None], keys: list[str]) -> None:
    """On the policy page, unless the first key is another's. Waits where one may open something."""
    await pilot.press("4")
    for key in keys:
        await pilot.press(key)
        if key not in TYPED:
            await pilot.pause()


def up_to_the_change(name: str) -> list[str]:
    """The keys up to the one that asks for the change; none of the rest can reach a dialog."""
    keys = KEYS[name][0]
    asks = {"set": "e", "unset": "u"}.get(name)
    if name == "doctor":
        return keys
    if name == "set until unset":
        return [*keys[: keys.index("enter") + 1], "enter"]
    return keys[: keys.index(asks, keys.index("enter")) + 1] if asks else keys[:1]


@pytest.mark.parametrize("name", KEYS)
async def test_a_change_says_what_will_happen_and_is_sent_on_yes(served: Node, name: str) -> None:
    keys, path, body = KEYS[name]
    app = served.app()
    async with app.run_test(size=SIZE) as pilot:
        await act(pilot, keys)
        assert SAYS[name] in words(pilot)
        assert served.posts == []
        await pilot.press("y")
        await pilot.pause()
        seen = {} if name in NOT_OF_A_POLICY else {"expected_generation": 2}
        sent = {"actor": "ada (top)", **seen, **body}
        assert served.posts == [(path, sent)]
        assert any("it takes effect at the next tick" in one for one in notices(app))
        screen = app.screen
        assert isinstance(screen, NodeScreen)
        assert isinstance(screen.feed, RecordedFeed)
        assert screen.feed.asked[-1] == "policy"


@pytest.mark.parametrize("keys", [["n"], ["escape"], ["enter"]])
async def test_anything_but_yes_sends_nothing(served: Node, keys: list[str]) -> None:
    app = served.app()
    async with app.run_test(size=SIZE) as pilot:
        await act(pilot, ["R"])
        await pilot.press(*keys)
        await pilot.pause()
        assert isinstance(app.screen, NodeScreen)
        assert served.posts == []


async def test_the_arrow_keys_reach_yes(served: Node) -> None:
    async with served.app().run_test(size=SIZE) as pilot:
        await act(pilot, ["R", "right", "enter"])
        assert len(served.posts) == 1


@EVERY
async def test_read_only_refuses_every_change(served: Node, name: str) -> None:
    app = served.app(readonly=True)
    async with app.run_test(size=SIZE) as pilot:
        await act(pilot, up_to_the_change(name))
        assert isinstance(app.screen, NodeScreen)
        assert served.posts == []
        assert any("read-only" in one for one in notices(app))


@EVERY
async def test_a_node_that_is_gone_cannot_be_changed(served: Node, name: str) -> None:
    app = served.app()
    app.sessions[0].model.apply(updates.Lost("gone"), 0)
    async with app.run_test(size=SIZE) as pilot:
        await act(pilot, up_to_the_change(name))
        assert isinstance(app.screen, NodeScreen)
        assert served.posts == []


async def test_a_refusal_is_shown_with_the_node_s_words(served: Node) -> None:
    served.answer = httpx.Response(
        409, json={"error": {"code": "stale_generation", "message": "look at it again"}}
    )
    app = served.app()
    async with app.run_test(size=SIZE) as pilot:
        await act(pilot, ["R"])
        await pilot.press("y")
        await pilot.pause()
        assert "look at it again" in notices(app)


async def test_a_change_carries_the_generation_that_was_seen(served: Node) -> None:
    app = served.app()
    async with app.run_test(size=SIZE) as pilot:
        await act(pilot, ["p", "R"])
        app.sessions[0].model.apply(updates.StatusUpdate(status_with({"policy.generation": 7})), 0)
        await pilot.press("y")
        await pilot.pause()
        assert served.posts[-1][1]["expected_generation"] == 2
        await act(pilot, ["R"])  # still paused: what is seen is still of then
        await pilot.press("y")
        await pilot.pause()
        assert [one["expected_generation"] for _, one in served.posts] == [2, 2]
        await act(pilot, ["p", "R"])
        await pilot.press("y")
        await pilot.pause()
        assert served.posts[-1][1]["expected_generation"] == 7


async def test_a_reload_that_changed_nothing_says_so(served: Node) -> None:
    served.answer = httpx.Response(200, json={"outcome": "unchanged"})
    app = served.app()
    async with app.run_test(size=SIZE) as pilot:
        await act(pilot, ["R"])
        await pilot.press("y")
        await pilot.pause()
        assert notices(app) == ["the document has not changed since it was loaded"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"findings": [{}], "error": None}, "the doctor looked: 1 finding, "),
        ({"findings": [{}, {}], "error": None}, "the doctor looked: 2 findings, "),
        ({"findings": [], "error": None}, "the doctor finds nothing wrong"),
        ({"findings": [], "error": "the machine could not be looked at"}, "could not be looked at"),
    ],
)
def test_what_the_doctor_answers_is_told(answer: dict[str, Any], words: str) -> None:
    assert words in changes.answer_words(answer)


def test_what_will_not_survive_a_restart_is_told() -> None:
    words = changes.answer_words({"not_kept": "the disk is full"})
    assert words.endswith("It will not survive a restart: the disk is full")


async def test_what_is_not_overridden_cannot_be_unset(served: Node) -> None:
    app = served.app()
    async with app.run_test(size=SIZE) as pilot:
        await act(pilot, ["u"])
        assert isinstance(app.screen, NodeScreen)
        assert any("nothing to unset" in one for one in notices(app))


async def test_a_mistyped_time_is_said_and_keeps_the_dialog(served: Node) -> None:
    app = served.app()
    async with app.run_test(size=SIZE) as pilot:
        await act(pilot, ["e", "enter", "enter"])
        assert isinstance(app.screen, ValueDialog)
        assert "a value is needed" in str(app.screen.query_one("#mistake", Static).render())
        await pilot.press(*"7", "enter", "enter")
        await pilot.pause()
        assert "say how long" in str(app.screen.query_one("#mistake", Static).render())
        await pilot.press(*"soon", "enter")
        await pilot.pause()
        assert '"soon" is not a time' in str(app.screen.query_one("#mistake", Static).render())
        app.screen.query_one("#for", Input).value = "1h30m"
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, ConfirmDialog)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("until unset", None),
        (" Until-unset", None),
        ("30s", 30),
        ("1h30m", 5_400),
        (" 2d ", 172_800),
    ],
)
def test_times_of_an_override(text: str, seconds: float | None) -> None:
    assert changes.parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["soon", "10", "-5m", "0s", "m", "5 m", "1.2.3m", "²m", "10ms"])
def test_times_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match="write 30s, 10m or 1h30m"):
        changes.parse_seconds(text)


def test_no_time_is_not_for_ever_as_on_the_command_line() -> None:
    with pytest.raises(ValueError, match='say how long: 10m or 1h30m, or "until unset"'):
        changes.parse_seconds(" ")


def test_frozen_levers_are_known(model: NodeModel) -> None:
    assert changes.frozen_levers(model) == {"watermark"}


def test_every_mode_has_its_meaning() -> None:
    sentences = {changes.set_mode("split", mode).consequences[0] for mode in changes.MODES}
    assert len(sentences) == len(changes.MODES) == 3
