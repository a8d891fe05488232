"""Drafts of the model's own MTP layer, verified on hot buffers that change size meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from standin_node import CudaNode, cuda_files, prompts

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1800)]
DRAFTS, ANSWER = 2, 12
CARD_BYTES = 27 * 2**20
"""Room for one long call whole, not for three, beside hot buffers of four times top-k."""
BOUNDS = (("hot.max", 3.0), ("hot.min", 4.0), ("hot.max", 3.0))
"""Of hot buffers, in top-k, of which the node begins with 4 and a step's rows may select 3."""


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CudaNode]:
    files = cuda_files(tmp_path_factory.mktemp("drafts") / "node", ranks=1, drafts=DRAFTS)
    served = CudaNode(files, card_bytes=CARD_BYTES)
    try:
        served.wait_until_ready()
        yield served
        assert served.end() == 0, served.log_end()
    finally:
        served.kill()


def test_tokens_stay_while_the_multiplier_moves_under_running_calls(drafting: CudaNode) -> None:
    node = drafting
    alone = [node.tokens(prompt, ANSWER) for prompt in prompts(10)]
    hot = node.observed().hot
    assert hot.resident_total == hot.references_total, "alone, a call reads only resident pages"
    seen = []
    with ThreadPoolExecutor(1) as pool:
        for key, size in BOUNDS:
            answers = pool.submit(node.together, prompts(10), ANSWER)
            node.operate("/v1/policy/set", key=key, value=size, for_s=600)
            assert answers.result() == alone
            observed = node.observed()
            seen.append(observed.hot.multiplier)
            assert not observed.ledger.violations
            node.operate("/v1/policy/unset", key=key)
    assert seen == [size for _, size in BOUNDS]
    hot = node.observed().hot
    assert hot.hits_total, "no row was read from a hot buffer"
    assert hot.loads_total, "no row was read from the host pool"
    assert node.counter("spec_decode_num_draft_tokens")
    assert node.counter("spec_decode_num_accepted_tokens")
