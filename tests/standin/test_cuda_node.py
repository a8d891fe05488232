"""A CUDA node serves: vLLM's own worker, model runner, model and connectors on two ranks.

Tokens depend on every KV byte that attention and indexer read, so equal tokens are equal bytes;
the stand-in also ends the engine where a host block changes between its store and its load.
"""

from __future__ import annotations

import signal
import threading

import pytest
from standin_node import ANSWER, CudaNode, prompts

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def alone(node: CudaNode) -> list[list[int]]:
    """The answers to ``prompts(0)`` where each call had the node for itself."""
    answers = [node.tokens(prompt, ANSWER) for prompt in prompts(0)]
    hot = node.observed().hot
    assert hot.resident_total == hot.references_total, "alone, a call reads only resident pages"
    return answers


def test_the_processes_are_spawned(node: CudaNode) -> None:
    assert node.spawned() == [True, True]


def test_calls_together_get_the_tokens_that_they_get_alone(
    node: CudaNode, alone: list[list[int]]
) -> None:
    assert node.together(prompts(0), ANSWER) == alone
    hot = node.observed().hot
    assert hot.hits_total, "no row was read from a hot buffer"
    assert hot.loads_total, "no row was read from the host pool"


def test_tokens_stay_while_every_lever_moves(node: CudaNode, alone: list[list[int]]) -> None:
    loaded = node.external_hits()
    seen = set()
    for offload, hot, running in (("40%", 1.0, 2), ("20%", 2.0, None)):
        values = {
            "pools.offload.start": offload,
            "hot.max": hot,
            "admission.max_running": running,
        }
        for key, value in values.items():
            node.operate("/v1/policy/set", key=key, value=value, for_s=600)
        # Others take the GPU's blocks, so what follows comes back from the host.
        node.together(prompts(3), ANSWER)
        assert node.together(prompts(0), ANSWER) == alone
        observed = node.observed()
        assert not observed.ledger.violations
        seen.add((observed.offload.lent_blocks, observed.hot.multiplier))
        for key in values:
            node.operate("/v1/policy/unset", key=key)
    assert len(seen) == 2, f"the levers did not move: {seen}"
    assert node.external_hits() > loaded, "no chunk came back from the offload pool"
    assert sum(one.get("loaded_as_stored", 0) for one in node.workers()) > 0


def test_one_rank_stores_the_one_copy_and_every_rank_loads_it(node: CudaNode) -> None:
    """After the test above: chunks came and went."""
    stores = [one.get("chunk_stores", 0) for one in node.workers()]
    assert sorted(map(bool, stores)) == [False, True], f"stores by rank: {stores}"
    assert all(one.get("chunk_loads", 0) for one in node.workers())


def test_a_slow_rank_delays_and_changes_nothing(node: CudaNode, alone: list[list[int]]) -> None:
    behind = node.rank(1)
    threading.Timer(1.0, behind.send_signal, (signal.SIGCONT,)).start()
    behind.send_signal(signal.SIGSTOP)
    assert node.tokens(prompts(0)[0], ANSWER) == alone[0]
    assert node.life().restarts_total == 0
