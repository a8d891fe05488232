"""What a CUDA node loses and keeps when parts of it die; preemption; vLLM's own kernels."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from serve_process import until
from standin_node import ANSWER, CARD_BYTES, CudaNode, cuda_files, prompts

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(3600)]
in_work = pytest.mark.skipif(
    not os.environ.get("HISPARSED_STANDIN"),
    reason="not seen to pass since the status document changed; HISPARSED_STANDIN=1 runs it",
)


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


@in_work
def test_a_killed_node_leaves_memory_that_the_next_one_takes_back(
    mortal: CudaNode, expected: list[list[int]], folder: Path
) -> None:
    os.killpg(mortal.pid, signal.SIGKILL)
    until("all are dead", lambda: not mortal.session_members())
    assert mortal.leftovers(), "the region of a killed node is still there"
    again = CudaNode(cuda_files(folder / "second"), card_bytes=CARD_BYTES)
    try:
        again.wait_until_ready()
        assert not mortal.leftovers(), "nothing removed what the dead node held"
        assert again.together(prompts(0), ANSWER) == expected
        assert again.end() == 0
    finally:
        again.kill()


@in_work
def test_vllms_kernels_give_the_same_tokens(expected: list[list[int]], tmp_path: Path) -> None:
    other = CudaNode(cuda_files(tmp_path / "vllm", kernels="vllm"), card_bytes=CARD_BYTES)
    try:
        other.wait_until_ready()
        assert other.together(prompts(0), ANSWER) == expected
        assert other.end() == 0
    finally:
        other.kill()
