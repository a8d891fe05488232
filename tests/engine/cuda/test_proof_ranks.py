"""Proof processes as the node runs them: right, wrong in a byte, slow, dead, hanging, absurd."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from stand_in_operators import SITE

from hisparsed.engine.cuda.proof.question import (
    ChunkProof,
    ChunkSizes,
    HotProof,
    HotSizes,
    Proof,
    Question,
    Timing,
)
from hisparsed.engine.cuda.proof.ranks import prove_all
from hisparsed.engine.cuda.proof.verdict import chunks_problem, judge_hot
from hisparsed.engine.kernel_choice import KernelReason

HERE = Path(__file__).parent
HOT = HotSizes(
    topk=16,
    query_len=2,
    start_rows=64,
    most_rows=128,
    row_bytes=656,
    layers=2,
    max_num_seqs=4,
    max_model_len=1024,
    block_tokens=16,
)
CHUNKS = ChunkSizes(layers=6, slice_bytes=64 * 656, pages=2, page_bytes=64 * 132)


def question(device: int = 0) -> Question:
    return Question(device=device, hot=HOT, chunks=CHUNKS)


def answer(device: int = 0, *, ours_us: float = 90.0, **changes: object) -> Proof:
    timings = (
        Timing(requests=1, ours_us=20.0, vllm_us=20.0),
        Timing(requests=64, ours_us=ours_us, vllm_us=100.0),
    )
    return Proof(
        device=device,
        hot=HotProof(rows=1000, graph=True, timings=timings).model_copy(update=changes),
        chunks=ChunkProof(chunks=40),
    )


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def ended(proof: Proof) -> str:
    assert proof.hot is not None
    assert proof.hot.error == proof.chunks.error
    return str(proof.hot.error)


async def test_each_gpu_has_a_process_and_an_answer() -> None:
    code = (
        "import json, sys\n"
        "asked = json.load(sys.stdin)\n"
        "parts = {'chunks': {'chunks': 3}, 'hot': {'rows': 5}}\n"
        "print(json.dumps({'device': asked['device'], **parts}))"
    )
    proofs = await prove_all([question(0), question(1)], command=python(code), limit_s=60)
    assert [one.device for one in proofs] == [0, 1]
    assert all(one.chunks.chunks == 3 for one in proofs)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import sys; sys.exit('CUDA error: no card')", "it ended with 1 CUDA error: no card"),
        ("print('hello')", "its answer cannot be read"),
        (f"print({answer(3).model_dump_json()!r})", "it answered for GPU 3"),
        ("import os; os.abort()", "it ended with -6"),
    ],
    ids=["fails", "absurd", "other gpu", "dies"],
)
async def test_a_process_without_an_answer_proves_nothing(code: str, says: str) -> None:
    (proof,) = await prove_all([question()], command=python(code), limit_s=60)
    assert says in ended(proof)


async def test_a_command_that_is_not_there_proves_nothing() -> None:
    (proof,) = await prove_all([question()], command=("/no/such/python",))
    assert "no process could be started" in ended(proof)


async def test_a_process_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "child.wait()\n"
    )
    (proof,) = await prove_all([question()], command=python(code), limit_s=3)
    assert "it did not end within 3s" in ended(proof)
    assert await gone(int((tmp_path / "pid").read_text()))


async def test_nothing_is_left_where_nobody_waits_any_more(tmp_path: Path) -> None:
    told = tmp_path / "told"
    os.mkfifo(told)
    code = f"import os, time\nopen({str(told)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    asked = asyncio.create_task(prove_all([question()], command=python(code)))
    pid = int(await asyncio.to_thread(told.read_text))
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert await gone(pid)


PROVES_FOR_EVER = """
import os, sys, time
import hisparsed.engine.cuda.proof.__main__ as proof

def prove(question):
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(600)

proof.prove = prove
proof.main()
"""
WAITS_FOR_IT = """
import asyncio, sys
from hisparsed.engine.cuda.proof.question import Question
from hisparsed.engine.cuda.proof.ranks import prove_all

question = Question.model_validate_json(sys.argv[1])
asyncio.run(prove_all([question], command=(sys.executable, "-c", *sys.argv[2:])))
"""


async def test_nothing_is_left_of_a_daemon_that_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "told"
    os.mkfifo(told)
    words = (question().model_dump_json(), PROVES_FOR_EVER, str(told))
    daemon = await asyncio.create_subprocess_exec(sys.executable, "-c", WAITS_FOR_IT, *words)
    pid = int(await asyncio.to_thread(told.read_text))
    daemon.kill()
    await daemon.wait()
    assert await gone(pid)


async def gone(pid: int) -> bool:
    """Whether the process has ended, or does within seconds; init may still have to reap it."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    loop, ends = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(watched, ends.set)
    try:
        await asyncio.wait_for(ends.wait(), 10)
    finally:
        loop.remove_reader(watched)
        os.close(watched)
    return True


# --- the whole process, on the stand-in GPU ---------------------------------------------


async def on_stand_in(monkeypatch: pytest.MonkeyPatch, *faults: str) -> list[Proof]:
    root = Path(__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(root), str(SITE))))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = str(HERE / "proof_process.py")
    asked = (prove_all([question()], command=(sys.executable, script, one)) for one in faults)
    return [proof for proofs in await asyncio.gather(*asked) for proof in proofs]


@pytest.mark.long
@pytest.mark.engine
async def test_the_process_finds_what_is_not_right(monkeypatch: pytest.MonkeyPatch) -> None:
    (wrong,) = await on_stand_in(monkeypatch, "wrong")
    verdict = judge_hot([answer(), wrong], 50.0)
    assert verdict.reason is KernelReason.DIFFERENT
    assert "layer 1" in verdict.because
    assert "byte 7" in verdict.because
    assert "are not those stored" in str(chunks_problem([answer(), wrong]))


@pytest.mark.long
@pytest.mark.engine
async def test_the_process_proves_what_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    (right,) = await on_stand_in(monkeypatch, "none")
    assert judge_hot([right], 50.0).reason is KernelReason.PROVED
    assert chunks_problem([right]) is None
    assert right.chunks.chunks > 100


# --- verdicts -----------------------------------------------------------------------------


def test_ours_are_used_where_all_gpus_are_right_and_fast_enough() -> None:
    verdict = judge_hot([answer(0), answer(1, ours_us=124.0)], 1.25)
    assert verdict.ours
    assert verdict.ratio == pytest.approx(1.24)
    assert [one.gpu for one in verdict.ranks] == [0, 1]
    assert verdict.ranks[1].requests == 64
    assert "124 us for vLLM's 100 us at 64 requests on GPU 1" in verdict.because


@pytest.mark.parametrize(("ours_us", "ours"), [(125.0, True), (125.1, False)])
def test_the_limit_of_time_counts_on_the_slowest_gpu(ours_us: float, ours: bool) -> None:
    verdict = judge_hot([answer(0), answer(1, ours_us=ours_us)], 1.25)
    assert verdict.ours is ours
    assert verdict.reason is (KernelReason.PROVED if ours else KernelReason.SLOWER)


@pytest.mark.parametrize(
    ("changes", "reason", "says"),
    [
        (
            {"difference": "row 3"},
            KernelReason.DIFFERENT,
            "on GPU 1 hisparsed's kernels read wrong rows: row 3",
        ),
        ({"error": "no memory"}, KernelReason.UNPROVED, "on GPU 1 did not finish: no memory"),
        ({"timings": ()}, KernelReason.UNPROVED, "nothing was compared or timed"),
        ({"rows": 0}, KernelReason.UNPROVED, "nothing was compared or timed"),
    ],
)
def test_one_gpu_is_enough_to_keep_vllms(
    changes: dict[str, object], reason: KernelReason, says: str
) -> None:
    verdict = judge_hot([answer(0), answer(1, **changes)], 1.25)
    assert (verdict.reason, verdict.ours) == (reason, False)
    assert says in verdict.because


def test_a_wrong_row_outweighs_an_error_elsewhere() -> None:
    verdict = judge_hot([answer(0, error="late"), answer(1, difference="row 3")], 1.25)
    assert verdict.reason is KernelReason.DIFFERENT


def test_nothing_asked_proves_nothing() -> None:
    assert not judge_hot([], 1.25).ours
    assert not judge_hot([answer().model_copy(update={"hot": None})], 1.25).ours
    assert chunks_problem([]) is not None


@pytest.mark.parametrize(
    ("chunks", "says"),
    [
        (ChunkProof(chunks=40), None),
        (ChunkProof(difference="GPU block 7"), "on GPU 0 wrong bytes came back: GPU block 7"),
        (ChunkProof(error="late"), "did not finish: late"),
        (ChunkProof(), "nothing was copied"),
    ],
)
def test_copies_are_trusted_where_all_came_back(chunks: ChunkProof, says: str | None) -> None:
    found = chunks_problem([answer(1), answer().model_copy(update={"chunks": chunks})])
    assert found is None if says is None else says in str(found)
