"""What the reference node refuses to start with, and its smallest slab."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from conversations import TOPK, EngineShape, ask, build_engine, finish, report, text

from hisparsed.config.node import NodeConfig
from hisparsed.config.sections import ReferenceConfig
from hisparsed.engine.launch import require_startable
from hisparsed.engine.reference.launch import max_lease_rows, slab_blocks_of_one_request
from hisparsed.errors import UserError

pytestmark = pytest.mark.engine

SHAPE = EngineShape(
    host_budget_bytes=4 << 20,
    max_num_seqs=1,
    max_num_batched_tokens=256,
    max_multiplier=2,
    speculative_tokens=1,
)


@pytest.mark.parametrize("tokens", [512, pytest.param(768, marks=pytest.mark.long)])
def test_one_longest_call_never_preempts_itself(tmp_path: Path, tokens: int) -> None:
    reference = ReferenceConfig(
        index_topk=TOPK,
        max_model_len=tokens,
        max_num_seqs=SHAPE.max_num_seqs,
        max_num_batched_tokens=SHAPE.max_num_batched_tokens,
        speculative_tokens=SHAPE.speculative_tokens,
    )
    blocks = slab_blocks_of_one_request(reference, SHAPE.max_multiplier)
    engine = build_engine(tmp_path, replace(SHAPE, gpu_blocks=blocks, max_model_len=tokens))
    ask(engine, "longest", text(tokens - 4, seed=1), 4)
    finish(engine, most_steps=40)
    assert report(engine)["requests"]["preemptions_total"] == 0


def test_slab_needs_room_for_scratch_and_for_the_leases_of_all_rows() -> None:
    sizes = {"max_model_len": 1024, "max_num_batched_tokens": 256, "max_num_seqs": 8}
    plain = ReferenceConfig(**sizes)
    speculative = ReferenceConfig(**sizes, speculative_tokens=3)
    more_lease = 2 * (4 - 2) * 64 // 16
    assert (
        slab_blocks_of_one_request(speculative, 2.0)
        == slab_blocks_of_one_request(plain, 2.0) + more_lease + 48
    )


def test_largest_lease_is_never_below_what_vllm_asks_for() -> None:
    speculative = ReferenceConfig(speculative_tokens=3)
    assert max_lease_rows(speculative, 1.0) == 4 * 64
    assert max_lease_rows(speculative, 5.0) == 5 * 64


def test_drafts_are_asked_for_in_the_nodes_own_section() -> None:
    config = NodeConfig(
        node="reference",
        host_budget=64 << 20,
        engine_args={"speculative_config": {"method": "ngram"}},
    )
    with pytest.raises(UserError, match=r"speculative_config: set reference\.speculative_tokens"):
        require_startable(config, "reference", max_multiplier=2.0)
