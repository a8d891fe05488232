"""A call with a prefix from the offload tier is never admitted, though all GPU memory is free.

``HiSparseResidentManager.get_num_blocks_to_allocate`` drops the admission cap where a prefix comes
from a connector: it asks for a resident page for the whole remainder of the prompt, in every index
group. A prefill holds no more than its steps in flight, which is what the cap says. Without the
hit the same prompt is admitted at once.
"""

from __future__ import annotations

from tests.upstream.outcome import run
from tests.upstream.stock import Shape, Workers, stock_engine, text

SHAPE = Shape(
    gpu_blocks=400,
    host_blocks=400,
    index_groups=4,
    hot_rows=128,
    max_model_len=4096,
    max_num_seqs=2,
)
PREFIX = text(512, "prefix")
PROMPT = PREFIX + text(1536, "remainder")
STEPS = 200
ANSWER = 8
"""Tokens, so that the last pages of the prompt are on the host before the call ends."""


def starts(workers: Workers) -> bool:
    """Whether a token of ``PROMPT`` is scheduled."""
    workers.add(PROMPT, 1)
    return any(workers.step().total_num_scheduled_tokens for _ in range(STEPS))


def reproduce() -> str | None:
    with stock_engine(SHAPE) as core:
        workers = Workers(core)
        workers.add(PREFIX, ANSWER)
        assert workers.run()
        workers.forget_gpu_prefixes()
        if starts(workers):
            return None
        free = workers.gpu_pool.get_num_free_blocks()
    with stock_engine(SHAPE) as core:
        assert starts(Workers(core)), "the prompt alone"
    return (
        f"A prompt of {len(PROMPT)} tokens, of which {len(PREFIX)} are in the offload tier, was "
        f"not scheduled in {STEPS} steps of an idle engine with {free} of {SHAPE.gpu_blocks} GPU "
        "blocks free. Without the hit the same prompt starts at once."
    )


if __name__ == "__main__":
    run(reproduce)
