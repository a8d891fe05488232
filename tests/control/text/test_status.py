"""The status page; `hisparsed status` and `explain` against a node on a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hisparsed.cli.app import app
from hisparsed.control.status.document import Lifecycle, Status
from hisparsed.control.text.policy import figures_text
from hisparsed.control.text.status import bar, clock_text, status_page
from hisparsed.engine.cuda.nvml import GpuCard, GpusStatus
from hisparsed.engine.kernel_choice import KernelReason, KernelsStatus
from hisparsed.engine.port import ServingCounters
from hisparsed.errors import UserError
from hisparsed.policy.derived import PoolFigures
from hisparsed.policy.signals import Lever, SampledRows

SLOW_KERNELS = KernelsStatus(
    asked="auto",
    used="vllm",
    reason=KernelReason.SLOWER,
    sentence="vLLM's kernels, one hot size: ours take 1.31 of vLLM's time",
    max_ratio=1.25,
    ratio=1.31,
    offload_trusted=False,
    offload_sentence="nothing is lent to the offload pool: chunk 7",
)


async def page(node: Any) -> str:
    await node.ticks(1)
    return status_page(node.current.status(), width=200)


async def test_waits_stalls_ghosts_and_the_need_of_the_next_call_are_told(node: Any) -> None:
    await node.loop.start()
    text = await page(node)
    assert "9 finished, the oldest waits 4s\n" in text
    assert "STALLS   2 found, 1 resolved, 1 call given up" in text
    assert "ghosts   1% more would have served 320 tokens in hisparse, 0 in offload" in text
    assert "60 of 400 blocks free; the next one needs 75" in text
    assert "refused by a limit" not in text
    assert "by their own miss curves" not in text


async def test_whose_kernels_run_and_what_is_not_trusted_is_told(node: Any) -> None:
    await node.loop.start()
    assert "\nkernels" not in await page(node)
    status = node.current.status().model_copy(update={"kernels": SLOW_KERNELS})
    text = status_page(status, width=200)
    assert "kernels    !! Slower: vLLM's kernels, one hot size: ours take 1.31 of" in text
    assert "  UNPROVED nothing is lent to the offload pool: chunk 7" in text
    proved = SLOW_KERNELS.model_copy(
        update={"reason": KernelReason.PROVED, "offload_trusted": True}
    )
    text = status_page(status.model_copy(update={"kernels": proved}), width=200)
    assert "kernels    Proved: " in text
    assert "UNPROVED" not in text


async def test_refused_calls_and_leases_of_their_own_are_told_where_there_are_any(
    node: Any,
) -> None:
    await node.loop.start()
    report = await node.engine.report()
    node.engine.counters = ServingCounters(refused=6)
    node.engine.changes = {"hot": replace(report.hot, individual_leases=2)}
    text = await page(node)
    assert "6 refused by a limit" in text
    assert ", 2 of them by their own miss curves" in text


async def test_what_a_node_does_not_know_is_left_out(node: Any) -> None:
    await node.loop.start()
    report = await node.engine.report()
    node.engine.changes = {
        "hisparse": replace(report.hisparse, ghost=()),
        "offload": replace(report.offload, ghost=()),
        "gpu": replace(report.gpu, head_need_blocks=None),
        "requests": replace(report.requests, oldest_wait_s=None, stalls_total=0),
    }
    text = await page(node)
    for words in ("ghosts", "the next one needs", "the oldest waits", "STALLS"):
        assert words not in text


async def test_rows_that_only_vllm_samples_are_told_with_their_age(node: Any) -> None:
    await node.loop.start()
    report = await node.engine.report()
    node.engine.changes = {"hot": replace(report.hot, counted=False)}
    assert "hits" not in await page(node)
    sampled = SampledRows(hits_total=90, misses_total=10, h2d_bytes_total=3 * 2**30, age_s=41.0)
    node.engine.counters = ServingCounters(sampled_rows=sampled)
    text = await page(node)
    assert "64 blocks leased by 2 requests, 90% hits, 3GiB loaded as of 41s ago" in text


async def test_nothing_is_wider_than_the_terminal_and_bars_give_way_to_their_figures(
    node: Any,
) -> None:
    await node.loop.start()
    report = await node.engine.report()
    offload = replace(report.offload, target_blocks=report.offload.target_blocks + 7)
    for changes in ({}, {"offload": offload}):
        node.engine.changes = changes
        await node.ticks(1)
        for width in (80, 100, 200):
            lines = status_page(node.current.status(), width=width).splitlines()
            path = str(node.policy_path)  # one word, which stays whole
            assert max(len(line) for line in lines if path not in line) <= width
            bars = [line for line in lines if line.startswith(("  hisparse [", "  offload  ["))]
            assert len({line.index("]") for line in bars}) == 1, "one scale for both"
            assert all(line.endswith(" tokens") for line in bars), "a pool is one line"
            (legend,) = [line for line in lines if "# in use" in line]
            assert legend.endswith("# in use  = prefix  . free"), "it is never broken"


async def test_each_name_stands_for_one_line_and_a_target_shows_where_it_differs(node: Any) -> None:
    await node.loop.start()
    text = await page(node)
    names = [line.split()[0] for line in text.splitlines() if not line.startswith(" ")]
    assert len(names) == len(set(names))
    assert ", target " not in text


async def test_gpus_are_one_line_that_names_the_slow_and_the_lost(node: Any) -> None:
    await node.loop.start()
    assert "\ngpus " not in await page(node)
    cards = [card(0, 100), card(1, 120, slowed_by=["thermal-hardware"]), card(2, None, lost=True)]
    node.gpus = GpusStatus(age_s=0.4, cards=cards)
    assert (
        "gpus       3 as of 0s ago, fullest 1 with 120GiB of 141GiB, 20GiB/s read over PCIe, "
        "1 slowed by thermal-hardware, 2 LOST" in await page(node)
    )


def card(index: int, used_gib: int | None, **changes: Any) -> GpuCard:
    known = used_gib is not None
    values: dict[str, Any] = {
        "index": index,
        "name": "H200",
        "uuid": f"GPU-{index}",
        "memory_used_bytes": used_gib * 2**30 if used_gib is not None else None,
        "memory_total_bytes": 141 * 2**30 if known else None,
        "utilization": 0.5 if known else None,
        "pcie_rx_bytes_per_s": 10.0 * 2**30 if known else None,
        "pcie_tx_bytes_per_s": 0.0 if known else None,
        "slowed_by": [] if known else None,
        "lost": False,
    }
    return GpuCard(**values | changes)


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
    assert "2x for the next lease (8 blocks per group)" in page
    assert "90% hits" in page
    assert "generation 1 (" in page
    assert "FROZEN" in page
    assert "ann froze split." in page


async def test_modes_are_listed_in_the_order_of_the_levers(served: Any) -> None:
    await command(served, "mode", "advise", "admission", "watermark")
    result = await command(served, "mode", "off", "split")
    assert "modes set   split off, admission advise, watermark advise" in result.stdout


async def test_the_status_page_before_the_first_report(node: Any) -> None:
    node.lifecycle = Lifecycle.STARTING
    page = status_page(node.current.status())
    assert "report     none: there is no engine, or it has not reported yet" in page
    assert "starting" in page


async def test_a_rejected_policy_and_a_stopped_journal_stand_out(node: Any) -> None:
    node.policy_path.write_text("version: 1\ntick: soon\n")
    node.operator.reload(actor="ann")
    status = node.current.status()
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
    page = status_page(node.current.status(), width=400)
    (event,) = [line for line in page.splitlines() if line.startswith("event ")]
    assert event.endswith("250ms, 5m or 1h30m ...")
    assert "hott" not in event


@pytest.mark.parametrize("unix_s", [1e13, -1e300])
def test_a_time_that_no_calendar_reaches_is_no_error(unix_s: float) -> None:
    assert clock_text(unix_s) == "a time beyond every calendar"


async def test_refused_commands_stand_out(node: Any) -> None:
    await node.loop.start()
    await node.ticks(1)
    assert "TROUBLE" not in status_page(node.current.status())
    node.engine.target, node.engine.apply_trouble = 10, [ValueError("not now")]
    await node.ticks(1)
    assert "TROUBLE  1 command refused, 0 ticks failed" in status_page(node.current.status())


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
    one = json.loads((await command(served, "explain", "split", "--json")).stdout)
    assert {view["lever"] for view in one["decisions"]} == {"split"}
    assert one["events"] == []
    both = await command(served, "explain", "split", "admission", "--all", "--last", "5", "--json")
    views = json.loads(both.stdout)["decisions"]
    assert {view["lever"] for view in views} == {"split", "admission"}
    assert [view["tick"] for view in views] == [6, 6, 5, 5, 4]
    every = await command(served, "explain", "--all", "--last", "100", "--json")
    assert len(json.loads(every.stdout)["decisions"]) == 24
    nothing = await command(served, "explain", "--code", "PendingRestart")
    assert nothing.stdout == "No decision matches.\n"


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
        (["brakes"], "use one of split, multiplier"),
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
    pool = PoolFigures(
        target_bytes=100,
        capacity_bytes=100,
        in_use_bytes=in_use,
        cached_bytes=cached,
        reach_tokens=0,
        ghost_tokens_total=None,
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
