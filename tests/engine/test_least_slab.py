"""The smallest slab that the node starts with serves the longest call."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from conversations import TOPK, EngineShape, build_engine, report

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
    from vllm import SamplingParams

    reference = ReferenceConfig(
        index_topk=TOPK,
        max_model_len=tokens,
        max_num_seqs=SHAPE.max_num_seqs,
        max_num_batched_tokens=SHAPE.max_num_batched_tokens,
        speculative_tokens=SHAPE.speculative_tokens,
    )
    blocks = slab_blocks_of_one_request(reference, SHAPE.max_multiplier)
    engine = build_engine(tmp_path, replace(SHAPE, gpu_blocks=blocks, max_model_len=tokens))
    prompt = [random.Random(1).randrange(32, 127) for _ in range(tokens - 4)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine.add_request("longest", {"prompt_token_ids": prompt}, params)
    for _ in range(40):
        engine.step()
    assert not engine.has_unfinished_requests()
    assert report(engine)["requests"]["preemptions"] == 0
