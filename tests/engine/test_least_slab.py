"""The smallest slab that the node starts with serves the longest call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from conversations import TOPK, EngineShape, ask, build_engine, finish, report, text

from hisparsed.config.reference import ReferenceConfig
from hisparsed.engine.reference.launch import slab_blocks_of_one_request

pytestmark = pytest.mark.engine

SHAPE = EngineShape(
    host_budget_bytes=4 << 20,
    max_num_seqs=1,
    max_num_batched_tokens=256,
    max_multiplier=2,
    speculative_tokens=1,
)


@pytest.mark.parametrize("tokens", [512, 768])
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
    assert report(engine)["requests"]["preemptions"] == 0
