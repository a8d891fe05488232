"""The proof of hisparsed's kernels finds their faults, and reports when it proves nothing.

vLLM's runtimes are real, its operators are the stand-in GPU's; hisparsed's kernels are the C++
backend.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from stand_in_operators import compiled, vllms_side_on_the_cpu

from hisparsed.engine.cuda.proof import addresses, hot
from hisparsed.engine.cuda.proof.compare import Reads, first_difference
from hisparsed.engine.cuda.proof.question import ChunkProof, HotProof, HotSizes, Proof
from hisparsed.engine.cuda.proof.verdict import judge_hot
from hisparsed.engine.cuda.proof.work import Work, work_steps
from hisparsed.engine.cuda.residency.group import GroupRows
from hisparsed.engine.cuda.residency.worker import WorkerResidency
from hisparsed.engine.kernel_choice import KernelReason

CPU = torch.device("cpu")
SIZES = HotSizes(
    topk=8,
    query_len=3,
    start_rows=32,
    most_rows=56,
    row_bytes=16,
    layers=2,
    max_num_seqs=5,
    max_model_len=512,
    block_tokens=4,
)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    vllms_side_on_the_cpu(monkeypatch)


def prove(sizes: HotSizes = SIZES) -> HotProof:
    return hot.prove_hot(sizes, CPU)


@pytest.mark.parametrize(
    "sizes", [SIZES, SIZES.model_copy(update={"query_len": 1, "layers": 1})], ids=["drafts", "one"]
)
def test_sound_kernels_are_equal_and_timed(sizes: HotSizes) -> None:
    proof = prove(sizes)
    assert (proof.difference, proof.error) == (None, None)
    assert proof.rows > 500
    assert [one.requests for one in proof.timings] == [1, 5]
    assert all(one.ours_us > 0 and one.vllm_us > 0 for one in proof.timings)


def test_one_wrong_byte_on_one_layer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = GroupRows.fetch

    def fetch_wrong(self: Any, layer: int, rows: slice) -> None:
        fetch(self, layer, rows)
        found = self._out.part(rows.start, rows.stop)
        if layer == 1 and found.swap_counts[0]:
            at = int(found.swap_physical[0, 0])
            self.layers[1].cache[at // 4, at % 4, 7] ^= 1

    monkeypatch.setattr(GroupRows, "fetch", fetch_wrong)
    assert "layer 1" in str(prove().difference)
    assert "byte 7 of the row" in str(prove().difference)


def test_kernels_that_are_right_but_slow_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = GroupRows.resolve

    def resolve_late(self: Any, *args: Any) -> Any:
        until_s = time.perf_counter() + 0.01
        while time.perf_counter() < until_s:
            pass
        return resolve(self, *args)

    monkeypatch.setattr(GroupRows, "resolve", resolve_late)
    verdict = judge_hot([Proof(device=0, hot=prove(), chunks=ChunkProof(chunks=1))], 1.25)
    assert verdict.reason is KernelReason.SLOWER
    assert verdict.ratio is not None
    assert verdict.ratio > 1.25


def test_rows_that_do_not_move_when_a_lease_shrinks_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GroupRows, "move", lambda *_: None)
    assert "byte" in str(prove().difference)


def test_rejected_drafts_that_are_not_forgotten_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerResidency, "written", lambda *_: None)
    assert "byte" in str(prove().difference)


def test_a_row_left_out_past_int32_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = addresses.gather

    def gather_short(
        host: Any, slab: Any, layout: Any, swap_host: Any, *rest: Any, **kw: Any
    ) -> None:
        gather(host, slab, layout, torch.where(swap_host >= 2**31, 0, swap_host), *rest, **kw)

    monkeypatch.setattr(addresses, "gather", gather_short)
    assert "past 2**31, was not copied" in str(prove().difference)


def test_row_numbers_that_wrap_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = addresses.resolve

    def resolve_wrapped(*args: Any, **kwargs: Any) -> Any:
        out = resolve(*args, **kwargs)
        return replace(out, swap_host=out.swap_host.to(torch.int32).long())

    monkeypatch.setattr(addresses, "resolve", resolve_wrapped)
    assert "host rows past 2**31" in str(prove().difference)


def test_where_vllm_reads_wrong_rows_ours_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = compiled().hisparse_gather_compact

    def gather_wrong(host: torch.Tensor, *rest: Any) -> None:
        gather(host ^ 1, *rest)

    monkeypatch.setattr(torch.ops._C_cache_ops, "hisparse_gather_compact", gather_wrong)
    with pytest.raises(RuntimeError, match="vLLM's own kernels read other rows than the host has"):
        prove()


def test_work_has_padding_short_contexts_and_selections_that_drift() -> None:
    work = Work.within(SIZES, 2**30)
    steps = work_steps(work, CPU, seed=1)
    first, second, padded = (next(steps) for _ in range(3))
    assert (first.requests, padded.requests) == (5, 4)
    assert bool((padded.topk[12:] == -1).all())
    assert int((first.topk[12:] >= 0).sum()) == 3 * 4, "the last request has half a top-k"
    kept = len({*first.topk[0].tolist()} & {*second.topk[0].tolist()})
    assert 0 < kept < SIZES.topk
    assert int(first.topk.max()) < work.context


def test_work_takes_a_small_part_of_a_small_card() -> None:
    sizes = SIZES.model_copy(
        update={"topk": 2048, "most_rows": 10_240, "start_rows": 8192, "row_bytes": 656}
    ).model_copy(update={"max_num_seqs": 256, "block_tokens": 64, "max_model_len": 131_072})
    large, small = Work.within(sizes, 140 * 2**30), Work.within(sizes, 8 * 2**30)
    assert large.requests == 64
    assert 1 <= small.requests < 64
    assert 2 * small.slab_bytes <= 2**30


def reads(rows: list[list[int]], valid: list[list[bool]], counts: list[int]) -> Reads:
    cells = torch.tensor(rows, dtype=torch.uint8).unsqueeze(-1).repeat(1, 1, 4)
    return Reads(cells, torch.tensor(valid), torch.tensor(counts, dtype=torch.int32))


RIGHT = reads([[5, 6], [7, 8]], [[True, True], [True, False]], [2, 1])


def test_what_lies_behind_a_selection_may_hold_anything() -> None:
    other = reads([[5, 6], [7, 99]], [[True, True], [True, False]], [2, 1])
    assert first_difference(other, RIGHT) is None


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (reads([[5, 6], [9, 8]], [[True, True], [True, False]], [2, 1]), "row 1, cell 0: byte 0"),
        (reads([[5, 6], [7, 8]], [[True, True], [True, True]], [2, 1]), "is not selected"),
        (reads([[5, 6], [7, 8]], [[True, False], [True, False]], [2, 1]), "would read nothing"),
        (reads([[5, 6], [7, 8]], [[True, True], [True, False]], [1, 1]), "1 cells are counted"),
    ],
    ids=["a byte", "too many", "too few", "a count"],
)
def test_every_kind_of_difference_is_told(found: Reads, says: str) -> None:
    assert says in str(first_difference(found, RIGHT))
