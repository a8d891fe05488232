"""What a CUDA node loses and keeps when parts of it die; preemption; vLLM's own kernels."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serve_process import until
from standin_node import ANSWER, CARD_BYTES, CudaNode, cuda_files, prompts

from hisparsed.node.engine.shared_memory import SharedMemoryRecord

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def mortal(folder: Path) -> Iterator[CudaNode]:
    """A node whose parts may die; unpinning takes its time, as of hundreds of GiB."""
    served = CudaNode(
        cuda_files(folder / "first", supervision={"first_wait": "200ms"}),
        card_bytes=CARD_BYTES,
        STANDIN_UNPIN_S="5",
    )
    try:
        served.wait_until_ready()
        yield served
    finally:
        served.kill()


@pytest.fixture(scope="module")
def expected(mortal: CudaNode) -> list[list[int]]:
    return mortal.together(prompts(0), ANSWER)


def test_preempted_calls_get_the_same_tokens(mortal: CudaNode) -> None:
    """Four answers grow until the GPU holds them no more."""
    asked = [prompt[:500] for prompt in prompts(0, 4)]
    alone = [mortal.tokens(prompt, 150) for prompt in asked]
    before = mortal.observed().requests.preemptions_total
    assert mortal.together(asked, 150) == alone
    assert mortal.observed().requests.preemptions_total > before


@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_that_dies_is_a_restart_with_its_reason(
    mortal: CudaNode, expected: list[list[int]], rank: int
) -> None:
    restarts = mortal.life().restarts_total
    before = {one["pid"] for one in mortal.workers()}
    mortal.rank(rank).send_signal(signal.SIGKILL)
    life = mortal.serves_again(restarts)
    assert life.last_exit is not None
    unpinned_at = max(one.get("unpinned_at", 0.0) for one in mortal.workers())
    began = [one["began_at"] for one in mortal.workers() if one["pid"] not in before]
    assert len(began) == 2
    assert min(began) > unpinned_at > 0.0, "it began before the memory was free"
    assert mortal.together(prompts(0), ANSWER) == expected
    assert len(mortal.leftovers()) <= 1, "a dead engine's shared memory stays"


def test_a_killed_node_leaves_memory_that_the_next_one_removes(
    mortal: CudaNode, expected: list[list[int]]
) -> None:
    """Killed with its whole group, while calls run and pools are in use."""
    with ThreadPoolExecutor(1) as pool:
        cut = pool.submit(mortal.together, prompts(3), 300)
        until("calls run", mortal.running)
        os.killpg(mortal.pid, signal.SIGKILL)
        assert cut.exception() is not None
    until("all are dead", lambda: not mortal.session_members())
    left = SharedMemoryRecord(mortal.files.state_dir).left()
    names = {Path(file.path).name for file in left}
    assert any(name.startswith("psm_") for name in names), "vLLM's queues are not on record"
    assert names >= {path.name for path in mortal.leftovers()}
    again = CudaNode(mortal.files, card_bytes=CARD_BYTES)
    try:
        again.wait_until_ready()
        assert not [file for file in left if file.is_there()], "it is not removed"
        assert again.together(prompts(0), ANSWER) == expected
        assert again.end() == 0
        again.assert_nothing_left()
        assert not SharedMemoryRecord(mortal.files.state_dir).left()
    finally:
        again.kill()


def test_vllms_kernels_give_the_same_tokens(
    mortal: CudaNode, expected: list[list[int]], tmp_path: Path
) -> None:
    """The last test: a machine may not hold two nodes."""
    mortal.kill()
    other = CudaNode(cuda_files(tmp_path / "vllm", kernels="vllm"), card_bytes=CARD_BYTES)
    try:
        other.wait_until_ready()
        assert [other.tokens(prompt, ANSWER) for prompt in prompts(0)] == expected
        assert other.together(prompts(0), ANSWER) == expected
        observed = other.observed()
        assert not observed.geometry.hot_live
        assert not observed.ledger.violations
        for worker in other.workers():
            assert worker["resolver_hits"], "no row was found in a hot buffer"
            assert worker["resolver_misses"], "no row was read from the host pool"
        assert other.end() == 0
        assert not other.leftovers(), "shared memory is left behind"
    finally:
        other.kill()
