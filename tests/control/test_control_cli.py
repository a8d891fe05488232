"""`hisparsed status` and `hisparsed explain` against a node on a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hisparsed.cli.app import app
from hisparsed.control.explain_text import figures_text
from hisparsed.control.status import PoolStatus, Status
from hisparsed.control.status_text import bar, clock_text, status_page
from hisparsed.errors import UserError
from hisparsed.policy.reasons import Lever


@pytest.fixture
async def served(node: Any) -> AsyncIterator[Any]:
    await node.open()
    await node.loop.start()
    yield node
    await node.close()


async def command(node: Any, *arguments: str) -> Result:
    socket = ["--socket", str(node.folder / "control.sock")]
    return await asyncio.to_thread(CliRunner().invoke, app, [*arguments, *socket])


def words(page: str) -> str:
    """A page as one line, wherever it was broken."""
    return " ".join(page.split())


async def test_the_status_page(served: Any) -> None:
    served.engine.in_use = 300
    served.engine.cached = 200
    await served.ticks(1)
    served.operator.freeze([Lever.SPLIT], actor="ann")
    result = await command(served, "status")
    assert result.exit_code == 0
    # A path is one word, however long the folder of this run is.
    lines = [line for line in result.stdout.splitlines() if str(served.folder) not in line]
    assert max(map(len, lines)) <= 80
    page = words(result.stdout)
    assert "hisparsed 0.1.0, reference node, serving, up 1m" in page
    assert "hisparse [########=====..........." in page
    assert "3 running (1 full, 1 mixed, 1 no residency), 1 waiting" in page
    assert "2x for the next lease (8 blocks a group)" in page
    assert "90% hits" in page
    assert "generation 1 (" in page
    assert "FROZEN" in page
    assert "ann froze split." in page


async def test_modes_are_listed_in_the_order_of_the_levers(served: Any) -> None:
    await command(served, "mode", "advise", "admission", "watermark")
    result = await command(served, "mode", "off", "split")
    assert "modes set   split off, admission advise, watermark advise" in result.stdout


async def test_the_status_page_before_the_first_report(node: Any) -> None:
    page = status_page(node.board.status())
    assert "report     none of the engine yet" in page
    assert "starting" in page


async def test_a_rejected_policy_and_a_stopped_journal_stand_out(node: Any) -> None:
    node.policy_path.write_text("version: 1\ntick: soon\n")
    node.operator.reload(actor="ann")
    status = node.board.status()
    stopped = status.journal.model_copy(
        update={"writing": False, "error": "disk is full", "dropped": 3}
    )
    page = words(status_page(status.model_copy(update={"journal": stopped})))
    assert "REJECTED 1 reload;" in page
    assert "policy.yaml:2: tick" in page
    assert "STOPPED: disk is full; 3 records dropped" in page


async def test_an_event_of_several_lines_is_cut_at_the_first(node: Any) -> None:
    node.policy_path.write_text("version: 1\ntick: soon\nhott: {}\n")
    node.operator.reload(actor="ann")
    page = status_page(node.board.status(), width=400)
    (event,) = [line for line in page.splitlines() if line.startswith("event ")]
    assert event.endswith("250ms, 5m or 1h30m ...")
    assert "hott" not in event


@pytest.mark.parametrize("unix_s", [1e13, -1e300])
def test_a_time_that_no_calendar_reaches_is_no_error(unix_s: float) -> None:
    assert clock_text(unix_s) == "a time beyond every calendar"


async def test_refused_commands_stand_out(node: Any) -> None:
    await node.loop.start()
    await node.ticks(1)
    assert "TROUBLE" not in status_page(node.board.status())
    node.engine.target, node.engine.apply_trouble = 10, [ValueError("not now")]
    await node.ticks(1)
    assert "TROUBLE  1 command refused, 0 ticks failed" in status_page(node.board.status())


async def test_status_as_json_is_the_document(served: Any) -> None:
    await served.ticks(1)
    result = await command(served, "status", "--json")
    assert Status.model_validate_json(result.stdout).loop.tick == 1


async def test_explain_tells_moves_with_figures_in_order(served: Any) -> None:
    served.engine.target = 10
    await served.ticks(2)
    served.operator.freeze([Lever.SPLIT], actor="ann")
    await served.ticks(1)
    result = await command(served, "explain")
    assert result.exit_code == 0
    text = result.stdout
    assert "split  moved  OffloadShortOfReach" in text
    assert "offload reach tokens" in text
    started, moved, froze = (
        text.index(part) for part in ("started", "OffloadShortOfReach", "ann froze split.")
    )
    assert started < moved < froze


async def test_explain_filters(served: Any) -> None:
    served.engine.target = 10
    await served.ticks(6)
    one = json.loads((await command(served, "explain", "--lever", "split", "--json")).stdout)
    assert {view["lever"] for view in one["decisions"]} == {"split"}
    assert one["events"] == []
    every = await command(served, "explain", "--all", "--last", "100", "--json")
    assert len(json.loads(every.stdout)["decisions"]) == 24
    nothing = await command(served, "explain", "--code", "PendingRestart")
    assert nothing.stdout == "No decision fits.\n"


async def test_explain_since_looks_back_from_now(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.ticks(6)
    monkeypatch.setattr("time.time", served.clock.wall)
    result = await command(served, "explain", "--all", "--since", "2s", "--json")
    assert {view["tick"] for view in json.loads(result.stdout)["decisions"]} == {5, 6}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lever", "brakes"], "use one of split, multiplier"),
        (["--code", "Because"], "OffloadShortOfReach"),
        (["--since", "yesterday"], "write 30s, 10m or 1h30m"),
    ],
)
def test_explain_refuses_what_it_does_not_know(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["explain", *arguments])
    assert isinstance(result.exception, UserError)
    assert said in str(result.exception)


def test_the_socket_can_come_from_the_environment(tmp_path: Any) -> None:
    where = str(tmp_path / "elsewhere.sock")
    result = CliRunner().invoke(app, ["status"], env={"HISPARSED_SOCKET": where})
    assert isinstance(result.exception, UserError)
    assert where in str(result.exception)


@pytest.mark.parametrize(
    ("in_use", "cached", "expected"),
    [
        (0, 0, "........"),
        (100, 0, "########"),
        (50, 50, "####===="),
        (1, 1, "#=......"),
        (100, 100, "########"),
    ],
)
def test_bars(in_use: int, cached: int, expected: str) -> None:
    pool = PoolStatus(
        target_bytes=100,
        capacity_bytes=100,
        in_use_bytes=in_use,
        cached_bytes=cached,
        reach_tokens=0,
        target_blocks=1,
        capacity_blocks=1,
    )
    assert bar(pool, 8) == expected


def test_figures_are_written_in_their_units() -> None:
    figures = {
        "pcie_budget_bytes_per_s": 2**30,
        "gpu_free_ratio": 0.125,
        "ageing_seconds": 90.0,
        "pool_bytes": 3 * 2**20,
        "reach_tokens": 1_234_567.0,
        "loads_per_s": 0.25,
        "shrinking_costs_s": 7.794e-06,
        "hisparse_reach_tokens": 5.0,
        "limit": None,
    }
    assert figures_text(figures) == (
        "PCIe budget 1GiB/s, GPU free 12.5%, ageing 1m30s, pool 3MiB, reach tokens 1,234,567, "
        "loads 0.25/s, shrinking costs 0.008ms, HiSparse reach tokens 5, limit unlimited"
    )
