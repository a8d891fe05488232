"""`hisparsed policy ...`, `freeze`, `thaw` and `mode` against a node on a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hisparsed.cli.app import app
from hisparsed.control.journal.records import DecisionView
from hisparsed.control.text.policy import explanation
from hisparsed.errors import UserError
from hisparsed.policy.forecasts import Figure, Outcome
from hisparsed.policy.problems import ConfigError
from hisparsed.policy.signals import Lever


@pytest.fixture
async def served(node: Any) -> AsyncIterator[Any]:
    await node.open()
    await node.loop.start()
    yield node
    await node.close()


async def command(node: Any, *arguments: str) -> Result:
    socket = ["--socket", str(node.folder / "control.sock")]
    return await asyncio.to_thread(CliRunner().invoke, app, [*arguments, *socket])


async def answer(node: Any, *arguments: str) -> Any:
    result = await command(node, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def write(folder: Path, text: str) -> str:
    path = folder / "other.yaml"
    path.write_text(text)
    return str(path)


def test_check_works_without_a_daemon(tmp_path: Path) -> None:
    good = write(tmp_path, "version: 1\n")
    result = CliRunner().invoke(app, ["policy", "check", good, "--offline"])
    assert result.exit_code == 0
    assert "other.yaml is valid" in result.stdout
    assert "Not compared: the sizes of a node, and the policy in force" in result.stdout


def test_check_shows_every_mistake_with_its_line(tmp_path: Path) -> None:
    bad = write(tmp_path, "version: 1\ntick: soon\nhott: {}\n")
    result = CliRunner().invoke(app, ["policy", "check", bad, "--offline"])
    assert isinstance(result.exception, ConfigError)
    assert [one.line for one in result.exception.problems] == [2, 3]
    as_json = CliRunner().invoke(app, ["policy", "check", bad, "--offline", "--json"])
    assert as_json.exit_code == 2
    document = json.loads(as_json.stdout)
    assert not document["ok"]
    assert [one["key"] for one in document["problems"]] == ["tick", "hott"]


async def test_check_asks_the_node_when_there_is_one(served: Any) -> None:
    impossible = write(served.folder, "version: 1\nhot: {min: 8, max: 9, start: 8}\n")
    result = await command(served, "policy", "check", impossible)
    assert result.exit_code == 2
    assert "other.yaml:2: " in result.stdout
    assert "this node can lease at most 4" in result.stdout
    offline = await asyncio.to_thread(
        CliRunner().invoke, app, ["policy", "check", impossible, "--offline"]
    )
    assert offline.exit_code == 0


async def test_check_without_a_daemon_says_what_it_could_not_compare(node: Any) -> None:
    good = write(node.folder, "version: 1\n")
    result = await command(node, "policy", "check", good)
    assert result.exit_code == 0, "the document is not to blame"
    said = " ".join(result.stdout.split())
    assert "other.yaml is valid" in said
    assert "Not compared: the sizes of a node, and the policy in force (no daemon answers" in said
    document = await answer(node, "policy", "check", good)
    assert document["ok"]
    assert document["node"] is None
    assert "no daemon answers" in document["not_compared"]
    bad = write(node.folder, "version: 1\ntick: soon\n")
    assert isinstance((await command(node, "policy", "check", bad)).exception, ConfigError)


async def test_check_names_what_would_change(served: Any) -> None:
    text = served.policy_path.read_text().replace("window: 3s", "window: 4s")
    result = await command(served, "policy", "check", write(served.folder, text))
    assert "it would change 1 key:\n    rebalance.window  3s  ->  4s\n" in result.stdout
    cut = write(served.folder, text[: text.index("  step: 5%")])
    for what in ("check", "diff"):
        said = (await command(served, "policy", what, cut)).stdout
        assert "4 keys return to their defaults: rebalance.step, " in said
    same = await command(served, "policy", "check", str(served.policy_path))
    assert same.stdout.endswith("it would change nothing.\n")


async def test_diff_says_what_would_change(served: Any) -> None:
    text = served.policy_path.read_text().replace("window: 3s", "window: 4s")
    result = await command(served, "policy", "diff", write(served.folder, text))
    assert result.stdout.split() == ["rebalance.window", "3s", "->", "4s"]
    same = await command(served, "policy", "diff", str(served.policy_path))
    assert same.stdout == "Nothing would change.\n"


async def test_reload_ends_badly_with_a_bad_policy(served: Any) -> None:
    served.policy_path.write_text("version: 1\ntick: soon\n")
    result = await command(served, "policy", "reload")
    assert isinstance(result.exception, UserError)
    assert "policy.yaml:2: tick" in str(result.exception)
    served.policy_path.write_text("version: 1\ntick: 2s\n")
    good = await command(served, "policy", "reload")
    assert (good.exit_code, good.stdout[:22]) == (0, "Loaded: generation 2 (")


async def test_set_needs_an_end_or_none_on_purpose(served: Any) -> None:
    for wrong in ([], ["--for", "1h", "--until-unset"]):
        result = await command(served, "policy", "set", "hot.max", "3", *wrong)
        assert isinstance(result.exception, UserError)
        assert "--for 1h, or --until-unset" in str(result.exception)
    result = await command(served, "policy", "set", "hot.max", "3", "--for", "soon")
    assert "is not a time" in str(result.exception)
    for beyond in ("0s", "367d"):
        result = await command(served, "policy", "set", "hot.max", "3", "--for", beyond)
        assert f'--for: "{beyond}" must be more than 0s and at most 366d' in str(result.exception)
    assert served.source.overrides == ()


async def test_set_says_what_needs_a_restart(served: Any) -> None:
    result = await command(served, "policy", "set", "hot.max", "9", "--for", "1h")
    assert "hot.max runs as 4; 9 needs a restart." in result.stdout


async def test_a_mode_is_shown_as_what_ends_with_the_daemon(served: Any) -> None:
    await command(served, "mode", "advise", "split")
    shown = (await command(served, "policy", "show")).stdout
    (line,) = [one for one in shown.splitlines() if one.startswith("levers.split.mode")]
    assert line.split()[1:4] == ["advise", "mode", "set"]
    assert line.endswith("until it is set back or the daemon ends")


async def test_set_show_and_unset(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_USER", "ann")
    monkeypatch.setattr("hisparsed.control.api.socket.Peer.name", "ann")
    result = await command(served, "policy", "set", "hot.max", "3", "--for", "1h")
    assert result.exit_code == 0
    assert result.stdout.startswith("hot.max = 3 until 2023-11-1")
    await answer(served, "policy", "set", "admission.order", "arrival", "--until-unset")
    shown = (await command(served, "policy", "show")).stdout
    assert "more keys have their default" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("hot.max")]
    assert "set by ann, 0s left" in line  # the clock of this test is in the past
    (line,) = [line for line in shown.splitlines() if line.startswith("rebalance.window")]
    assert line.split() == ["rebalance.window", "3s", "line", "8"]
    assert "hot.min" not in shown
    assert "\ntick " not in shown  # written, but it is the default
    assert "hot.min" in (await command(served, "policy", "show", "--all")).stdout
    page = (await command(served, "status")).stdout
    assert "hot.max = 3 by ann until 2023-11-1" in page
    assert "admission.order = arrival by ann until it is unset" in page
    assert (await command(served, "policy", "unset", "hot.max")).exit_code == 0
    assert [one.key for one in served.source.overrides] == ["admission.order"]
    again = await command(served, "policy", "unset", "hot.max")
    assert "set now: admission.order" in str(again.exception)


async def test_a_refused_value_says_why(served: Any) -> None:
    result = await command(served, "policy", "set", "hot.max", "0.5", "--for", "1h")
    assert isinstance(result.exception, UserError)
    assert str(result.exception).startswith("hot.max: 0.5 is too small; write 1 or more")


async def test_show_tells_of_rejection_restart_and_schedules(served: Any) -> None:
    served.policy_path.write_text(
        "version: 1\nhot: {max: 9}\n"
        "schedules: [{name: busy, when: {pressure: high}, set: {hot.step: 1}}]\n"
    )
    await command(served, "policy", "reload")
    served.policy_path.write_text("version: 1\ntick: soon\n")
    await command(served, "policy", "reload")
    shown = (await command(served, "policy", "show")).stdout
    assert "RESTART     hot.max runs as 4; 9 needs a restart" in shown
    assert "schedules   busy" in shown
    assert "REJECTED" in shown
    assert "policy.yaml:2: tick" in shown
    page = (await command(served, "status")).stdout
    assert "RESTART  hot.max runs as 4; 9 needs a restart" in page


async def test_freeze_thaw_and_mode(served: Any) -> None:
    assert (await answer(served, "freeze", "split", "admission"))["frozen"] == [
        "split",
        "admission",
    ]
    assert (await answer(served, "thaw", "split"))["frozen"] == ["admission"]
    assert (await answer(served, "thaw"))["frozen"] == []
    assert len((await answer(served, "freeze"))["frozen"]) == 4
    assert (await answer(served, "mode", "advise", "split"))["overridden"] == {"split": "advise"}
    text = (await command(served, "mode", "policy")).stdout
    assert text.splitlines()[1].split() == ["modes", "set", "none"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["freeze", "brakes"], 'LEVERS: "brakes" is not known'),
        (["mode", "on"], 'MODE: "on" is not known; use one of act, advise, off, policy'),
    ],
)
def test_unknown_words_are_refused_before_asking(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UserError)
    assert says in str(result.exception)


async def test_replay_of_the_running_nodes_journal(served: Any) -> None:
    served.engine.target = 10
    await served.ticks(3)
    await asyncio.to_thread(served.journal.close)
    state, policy = str(served.folder / "state"), write(served.folder, "version: 1\nmode: off\n")
    arguments = ["policy", "replay", state, "--policy", policy]
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == 0, result.output
    assert "3 ticks are decided differently" in result.stdout
    document = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert document["levers"]["split"]["replayed_reasons"] == {"Off": 3}


async def test_explain_wraps_to_the_terminal(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served.engine.target = 10
    await served.ticks(3)
    monkeypatch.setenv("COLUMNS", "60")
    narrow = (await command(served, "explain", "split")).stdout
    assert max(len(line) for line in narrow.splitlines()) <= 60
    monkeypatch.setenv("COLUMNS", "300")
    wide = (await command(served, "explain", "split")).stdout
    assert 60 < max(len(line) for line in wide.splitlines()) <= 100
    assert narrow.split() == wide.split()


async def test_explain_since_is_not_cut_at_twenty(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.ticks(30)
    monkeypatch.setattr("time.time", served.clock.wall)
    document = await answer(served, "explain", "--all", "split", "--since", "25s")
    assert len(document["decisions"]) == 25
    assert len((await answer(served, "explain", "--all", "split"))["decisions"]) == 20


def judged(sequence: int, came: float) -> DecisionView:
    """A move of the multiplier, and the verdict on the one before."""
    expected, found = {Figure.FREED: 512.0}, {Figure.FREED: came}
    return DecisionView(
        sequence=sequence,
        at_unix_s=1_000.0 + sequence,
        tick=sequence,
        policy_generation=1,
        policy_hash="0" * 64,
        lever=Lever.MULTIPLIER,
        code="GpuPoolPressure",
        cause="GpuPoolPressure",
        limited_by=None,
        acts=True,
        notable=True,
        current=4.0,
        wanted=3.0,
        in_force=None,
        error=None,
        figures={},
        sentence="Lease 3x.",
        expected={Figure.FREED: 256.0, Figure.LOADED: 2_000_000_000},
        outcome=Outcome(12.0, 5.0, 4.0, 10.0, expected, found),
    )


def test_a_decision_says_what_is_expected_and_what_came_of_the_move_before() -> None:
    text = explanation([judged(1, 500.0), judged(2, 256.0)], [], width=100)
    assert "Expected: freed GPU blocks 256, loaded 1.86GiB/s." in text
    assert (
        "Came of 5 to 4, 12s ago, over 10s: freed GPU blocks 256 for freed GPU blocks 512 "
        "expected, off by 50%."
    ) in " ".join(text.split())
    assert text.endswith(
        "Expected against what came, of the moves judged above:\n"
        "    multiplier, freed gpu blocks: 2 moves, off by 50% (p50) and 50% (p90)\n"
    )
    assert "Expected" not in explanation([], [], width=100)
