"""A recorded journal: read as far as it goes, played, paused, sped up and sought in."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from recorded_journal import BEGIN, TICKS, write_journal
from recorded_node import recorded

from hisparsed.control.journal.store import _POLICIES
from hisparsed.policy.decisions import ACTING, Decision, EngineCommand, LeverDecision, Reason
from hisparsed.policy.forecasts import Figure, Outcome
from hisparsed.policy.signals import Lever
from hisparsed.tui.app import NodeScreen, TopApp
from hisparsed.tui.feed import journal_session
from hisparsed.tui.journal_player import JournalPlayer, flat_decisions, status_document
from hisparsed.tui.journal_reader import JournalReader, RecordedTick
from hisparsed.tui.model import NodeModel
from hisparsed.tui.options import ViewError
from hisparsed.tui.views.drawing import ViewContext
from hisparsed.tui.views.policy import effective_mode, summary_lines
from hisparsed.tui.widgets import LinesView


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("journal") / "journal.sqlite"
    write_journal(path)
    return path


OPEN: list[JournalReader] = []


def open_journal(path: Path) -> JournalReader:
    """Closed when the test ends."""
    OPEN.append(JournalReader(path))
    return OPEN[-1]


@pytest.fixture(autouse=True)
def close_journals() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


class Playing:
    """A player on a model, without a clock."""

    def __init__(self, path: Path) -> None:
        self.reader = open_journal(path)
        self.player = JournalPlayer(self.reader, clock=lambda: 0.0)
        self.model = NodeModel("journal")
        self.player.start(lambda update: self.model.apply(update, 0.0))
        self.player.seek(BEGIN)
        self.player.playing = True

    @property
    def at(self) -> float:
        """Seconds of journal that the model shows."""
        return (self.model.node_time_s or 0.0) - BEGIN


@pytest.mark.parametrize("reason", Reason)
@pytest.mark.parametrize("bounded", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_recorded_decision_reads_as_the_daemon_showed_it(reason: Reason, bounded: bool) -> None:
    """Whatever the reason, and also where a lever acts without another value: shared leases,
    limits alone."""
    from hisparsed.control.journal.records import (
        APPLIED_JSON,
        DECISION_JSON,
        Applied,
        Difference,
        TickRecord,
        view_tick,
    )

    figures = {Figure.FREED: 512.0}
    lever = LeverDecision(
        Lever.MULTIPLIER, 2.0, 2.0, None, reason, reason, {"a": 1.0}, "Why.",
        figures, Outcome(12.0, 3.0, 2.0, 10.0, figures, {Figure.FREED: 500.0}),
    )  # fmt: skip
    decision = Decision(1.0, 7, 3, (lever,), EngineCommand())
    error = None if bounded else "no memory"
    found = (Difference(Lever.MULTIPLIER, 2.0, 1.5),) if bounded else ()
    applied = Applied(EngineCommand(), None, error, found)
    record = TickRecord(
        9,
        12.0,
        "hash",
        cast(Any, None),
        decision,
        applied,
        None,
        frozenset({Lever.MULTIPLIER}),
        None,
    )
    tick = RecordedTick(
        1, "run", 9, 12.0, "hash", {}, json.loads(DECISION_JSON.dump_json(decision)),
        json.loads(APPLIED_JSON.dump_json(applied)), None, None, frozenset(Lever),
    )  # fmt: skip
    shown = [view.model_dump(mode="json") for view in view_tick(record)]
    assert flat_decisions(tick) == shown
    assert shown[0]["acts"] is (reason in ACTING)


@pytest.mark.parametrize(
    ("code", "mode"),
    [("AdviseOnly", "advise"), ("Off", "off"), ("SharedByGain", "act"), ("PolicyValue", "act"),
     ("Stale", ""), ("CodeOfAnotherVersion", "")],
)  # fmt: skip
def test_a_recorded_lever_has_the_mode_that_its_reason_tells(code: str, mode: str) -> None:
    decision = {"levers": [{"lever": "split", "current": 1, "wanted": 1, "reason": code}]}
    tick = RecordedTick(
        1, "run", 9, 12.0, "hash", recorded("tick")["snapshot"], decision, None, None, None,
        frozenset(),
    )  # fmt: skip
    assert status_document(tick, 0.0)["levers"][0]["mode"] == mode


def test_every_tick_and_move_is_found(journal: Path) -> None:
    reader = open_journal(journal)
    assert len(reader.ids) == TICKS
    assert reader.moves == [BEGIN + at for at in range(50, TICKS, 100)]
    assert reader.damage is None


def test_playing_shows_the_node_at_that_time(journal: Path) -> None:
    playing = Playing(journal)
    playing.player.advance(20.0)
    assert playing.at == 20
    assert playing.model.observed["requests"] == recorded("tick")["snapshot"]["requests"]
    assert [one["sentence"] for one in playing.model.events] == ["Started."]
    assert playing.model.history.latest("tokens", 10) == pytest.approx(10)


def test_standing_still_shows_nothing_new(journal: Path) -> None:
    playing = Playing(journal)
    playing.player.command("toggle")
    playing.player.advance(20.0)
    assert playing.at == 0
    playing.player.command("toggle")
    playing.player.advance(20.0)
    assert playing.at == 20


def test_faster_and_slower(journal: Path) -> None:
    playing = Playing(journal)
    for _ in range(3):
        playing.player.command("faster")
    assert playing.player.speed == 10
    playing.player.advance(10.0)
    assert playing.at == 100
    for _ in range(20):
        playing.player.command("slower")
    assert playing.player.speed == 0.5
    for _ in range(20):
        playing.player.command("faster")
    assert playing.player.speed == 1_000


def test_no_move_is_left_out_however_fast(journal: Path) -> None:
    playing = Playing(journal)
    playing.player.speed = 1_000.0
    playing.player.advance(0.599)
    moved = {one["at_unix_s"] - BEGIN for one in playing.model.decisions if one["acts"]}
    assert moved == {50, 150, 250, 350, 450, 550}
    assert playing.at == 599


@pytest.mark.parametrize(
    ("commands", "place"),
    [
        (["on"], 30), (["on", "on", "back"], 30), (["far_on"], 599), (["far_on", "far_back"], 0),
        (["back"], 0), (["next_move"], 50), (["next_move", "next_move"], 150),
        (["far_on", "previous_move"], 550), (["previous_move"], 0),
    ],
)  # fmt: skip
def test_seeking(journal: Path, commands: list[str], place: float) -> None:
    playing = Playing(journal)
    for command in commands:
        playing.player.command(command)
    assert playing.at == place


def test_seeking_brings_the_past_along(journal: Path) -> None:
    playing = Playing(journal)
    playing.player.seek(BEGIN + 500)
    assert len(playing.model.history) > 100
    assert {one["at_unix_s"] - BEGIN for one in playing.model.decisions} == {50, 150, 250, 350, 450}
    playing.player.seek(BEGIN + 60)
    assert {one["at_unix_s"] - BEGIN for one in playing.model.decisions} == {50}


def test_at_the_end_it_says_so_and_begins_again(journal: Path) -> None:
    playing = Playing(journal)
    playing.player.seek(BEGIN + 10_000)
    assert "at the end" in playing.player.words()
    playing.player.command("toggle")
    assert playing.at == 0
    assert playing.player.playing


def test_a_command_that_is_none_is_refused(journal: Path) -> None:
    with pytest.raises(ValueError, match="knows no 'sideways'"):
        Playing(journal).player.command("sideways")


async def test_a_recorded_decision_has_its_snapshot_and_outcome(journal: Path) -> None:
    playing = Playing(journal)
    playing.player.seek(BEGIN + 60)
    move = next(one for one in playing.model.decisions if one["acts"])
    whole = await playing.player.tick(move)
    assert whole["snapshot"]["tick"] == 50
    assert whole["confirmation"] == {"tick": 50, "differences": []}
    assert whole["after"]["at_unix_s"] == BEGIN + 110
    with pytest.raises(ViewError):
        await playing.player.tick({**move, "sequence": 77})


def test_every_tick_can_be_asked_for(journal: Path) -> None:
    playing = Playing(journal)
    playing.player.seek(BEGIN + 20)
    assert not playing.model.decisions
    playing.player.refresh_decisions(None, None)
    assert len({one["sequence"] for one in playing.model.decisions}) == 21


@pytest.mark.parametrize("keep", [0.9, 0.6, 0.3])
def test_a_torn_journal_is_read_as_far_as_it_goes(
    journal: Path, tmp_path: Path, keep: float
) -> None:
    torn = tmp_path / "torn.sqlite"
    data = journal.read_bytes()
    torn.write_bytes(data[: int(len(data) * keep)])
    playing = Playing(torn)
    assert 0 < len(playing.reader.ids) < TICKS or playing.reader.damage
    playing.player.speed = 1_000.0
    playing.player.advance(1.0)
    playing.player.command("far_back")
    assert playing.model.status is not None
    assert "damaged" in playing.player.words()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no file"), (b"not a journal at all, " * 100, "not a readable journal")],
)
def test_what_is_no_journal_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "x.sqlite"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ViewError, match=message):
        JournalReader(path)


def test_another_schema_is_refused(journal: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    other.write_bytes(journal.read_bytes())
    with closing(sqlite3.connect(other)) as database, database:
        database.execute("PRAGMA user_version = 7")
    with pytest.raises(ViewError, match="schema version 7"):
        JournalReader(other)


def test_an_empty_journal_is_refused(tmp_path: Path) -> None:
    write_journal(tmp_path / "empty.sqlite", 0)
    with pytest.raises(ViewError, match="holds no readable tick"):
        JournalReader(tmp_path / "empty.sqlite")


def shown(app: TopApp, selector: str) -> str:
    return "\n".join(one.plain for one in app.screen.query_one(selector, LinesView).lines)


async def test_the_keys_of_the_player(journal: Path) -> None:
    session = journal_session(open_journal(journal), "journal")
    player = session.player
    assert player is not None
    app = TopApp([session])
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert (player.playing, player.at_s) == (False, BEGIN + TICKS - 1), "it opens at its end"
        assert "at the end" in shown(app, "#header")
        await pilot.press("space", "space")
        await pilot.pause()
        assert not player.playing
        assert player.at_s < BEGIN + 10, "from the end it plays from the beginning"
        assert "paused" in shown(app, "#header")
        player.seek(BEGIN)
        await pilot.press("plus", "plus")
        assert player.speed == 5
        await pilot.press("minus")
        assert player.speed == 2
        place = player.at_s
        for key, step in (("right", 30.0), ("left", -30.0)):
            await pilot.press(key)
            assert player.at_s == pytest.approx(place + max(0.0, step))
        await pilot.press("right_square_bracket")
        assert player.at_s == BEGIN + 50
        await pilot.press("left_square_bracket")
        assert player.at_s == BEGIN
        await pilot.press("shift+right")
        assert player.at_s == BEGIN + TICKS - 1
        await pilot.press("shift+left")
        assert player.at_s == BEGIN
        await pilot.press("space")
        assert player.playing
        await pilot.press("3", "2", "4", "R")
        await pilot.pause()
        assert isinstance(app.screen, NodeScreen)
        assert any("recorded journal" in one.message for one in app._notifications)


async def test_the_player_runs_by_its_clock(journal: Path) -> None:
    reader, model, now = open_journal(journal), NodeModel("journal"), [0.0]
    far_enough = asyncio.Event()

    async def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 42:
            far_enough.set()
        await asyncio.sleep(0)

    player = JournalPlayer(reader, clock=lambda: now[0], sleep=sleep)
    player.start(lambda update: model.apply(update, 0.0))
    player.seek(BEGIN)
    player.playing = True
    running = asyncio.create_task(player.run())
    await asyncio.wait_for(far_enough.wait(), 10)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert player.at_s - BEGIN == pytest.approx(now[0], abs=0.5)


def test_the_daemon_s_own_journal_can_be_read(tmp_path: Path) -> None:
    """Written by the daemon's code: both sides agree on the file."""
    from hisparsed.control.journal.store import SCHEMA_VERSION
    from hisparsed.tui import journal_reader

    assert journal_reader.SCHEMA_VERSION == SCHEMA_VERSION


LONG_TICKS = 8_000


def test_jumps_are_quick(tmp_path: Path) -> None:
    """Two hours and more at a tick a second; in CPU time, so that other load does not count."""
    write_journal(tmp_path / "journal.sqlite", ticks=LONG_TICKS)
    playing = Playing(tmp_path / "journal.sqlite")
    playing.player.seek(playing.player.end_s)
    began_s = time.process_time()
    for _ in range(12):
        playing.player.command("far_back")
    assert time.process_time() - began_s < 2.0, "they took 8 s"
    assert playing.at == LONG_TICKS - 1 - 12 * 600
    assert len(playing.model.history) > 100


def test_the_policy_is_that_of_the_time(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    write_journal(path, ticks=60)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(_POLICIES)
        for at_s, most in ((BEGIN - 5, "4"), (BEGIN + 30.5, "8")):
            document = recorded("policy")
            document["values"]["hot.max"] = most
            database.execute(
                "INSERT INTO policies (run, at_unix_s, generation, document)"
                " VALUES ('run', ?, 1, ?)",
                (at_s, json.dumps(document)),
            )
    playing = Playing(path)
    shown_then = []
    for at_s in (0, 30, 31, 59, 10):
        playing.player.seek(BEGIN + at_s)
        assert playing.model.policy is not None
        shown_then.append(playing.model.policy["values"]["hot.max"])
    assert shown_then == ["4", "4", "8", "8", "4"]
    playing.player.seek(BEGIN + 29)
    playing.player.advance(5.0)
    assert playing.model.policy["values"]["hot.max"] == "8", "while it plays, too"
    assert effective_mode(playing.model) == "act", "of the policy, as no tick says it"
    playing.player.seek(BEGIN)
    assert ", 0s of 59s" in playing.player.words()


def test_a_journal_without_policies_says_so(journal: Path) -> None:
    playing = Playing(journal)
    said = summary_lines(playing.model, 100, ViewContext())[0].plain
    assert said == ("this journal does not hold the policy: daemons before 0.2 kept its hash only")
