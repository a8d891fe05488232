"""What the plain status page says of the figures that the decisions rest on."""

from __future__ import annotations

from typing import Any

from hisparsed.control.engine_port import SampledRows, ServingCounters
from hisparsed.control.status_gpus import GpuCard, GpusStatus
from hisparsed.control.status_text import status_page


async def page(node: Any) -> str:
    await node.ticks(1)
    return status_page(node.board.status(), width=200)


async def test_waits_stalls_ghosts_and_the_need_of_the_next_call_are_told(node: Any) -> None:
    await node.loop.start()
    text = await page(node)
    assert "9 finished, the oldest waits 4s\n" in text
    assert "STALLS   2 found, 1 resolved, 1 call given up" in text
    assert "ghosts   1% more would have served 320 tokens in hisparse, 0 in offload" in text
    assert "60 of 400 blocks free; the next one needs 75" in text
    assert "refused by a limit" not in text
    assert "by their own misses" not in text


async def test_refused_calls_and_leases_of_their_own_are_told_where_there_are_any(
    node: Any,
) -> None:
    await node.loop.start()
    report = await node.engine.report()
    node.engine.counters = ServingCounters(refused=6)
    node.engine.changes = {"hot": report.hot.model_copy(update={"individual_leases": 2})}
    text = await page(node)
    assert "6 refused by a limit" in text
    assert ", 2 of them by their own misses" in text


async def test_what_a_node_does_not_know_is_left_out(node: Any) -> None:
    await node.loop.start()
    report = await node.engine.report()
    node.engine.changes = {
        "host": report.host.model_copy(update={"hisparse_ghost": [], "offload_ghost": []}),
        "gpu_head_need_blocks": None,
        "requests": report.requests.model_copy(update={"oldest_wait_s": None, "stalls_found": 0}),
    }
    text = await page(node)
    for words in ("ghosts", "the next one needs", "the oldest waits", "STALLS"):
        assert words not in text


async def test_rows_that_only_vllm_samples_are_told_with_their_age(node: Any) -> None:
    await node.loop.start()
    report = await node.engine.report()
    node.engine.changes = {"hot": report.hot.model_copy(update={"counted": False})}
    assert "hits" not in await page(node)
    sampled = SampledRows(hits=90, misses=10, h2d_bytes=3 * 2**30, age_s=41.0)
    node.engine.counters = ServingCounters(sampled_rows=sampled)
    text = await page(node)
    assert "64 blocks leased by 2 requests, 90% hits, 3GiB loaded as of 41s ago" in text


async def test_nothing_is_wider_than_the_terminal_and_bars_give_way_to_their_figures(
    node: Any,
) -> None:
    await node.loop.start()
    report = await node.engine.report()
    wanted = report.host.offload_target_blocks + 7
    host = report.host.model_copy(update={"offload_target_blocks": wanted})
    for changes in ({}, {"host": host}):
        node.engine.changes = changes
        await node.ticks(1)
        for width in (80, 100, 200):
            lines = status_page(node.board.status(), width=width).splitlines()
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
    node.board.gpus = lambda: GpusStatus(age_s=0.4, cards=cards)
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
