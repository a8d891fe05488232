"""Two calls whose prefixes were loaded block each other; nothing runs any more.

Blocks are given to a load when it begins, if it fits in addition to what the loads before it are
expected to need. With HiSparse that is counted too small: pages that are only on the host count
against the admission cap. The first call then cannot continue, the second is behind it, and vLLM
preempts running calls only.
"""

from __future__ import annotations

from tests.upstream.outcome import run
from tests.upstream.stock import Shape, Workers, stock_engine, text

SHAPE = Shape(gpu_blocks=90)
STEPS = 200
ANSWER = 8
"""Tokens, so that the last pages of a prompt are on the host before its call ends."""
CALLS = ((1, 81, 200), (2, 113, 127))
"""Seed, tokens of the prefix, tokens of the call that continues it."""


def reproduce() -> str | None:
    with stock_engine(SHAPE) as core:
        workers = Workers(core)
        for seed, prefix, _ in CALLS:
            workers.add(text(prefix, seed), ANSWER)
            assert workers.run()
        workers.forget_gpu_prefixes()
        workers.hold = True
        for seed, _, tokens in CALLS:
            workers.add(text(tokens, seed), 2)
        for _ in range(4):
            workers.step()
        workers.hold = False
        if workers.run(STEPS):
            return None
        running = len(workers.scheduler.running)
        free = workers.gpu_pool.get_num_free_blocks()
        waiting = [
            f"{one.request_id} ({one.status.name}, {one.num_computed_tokens} of {one.num_tokens} "
            "tokens loaded)"
            for one in workers.scheduler.requests.values()
        ]
        in_flight = len(workers.jobs)
    return (
        f"After {STEPS} steps {running} calls run and {in_flight} transfers are in flight; "
        f"{free} of {SHAPE.gpu_blocks} GPU blocks are free. Waiting: {', '.join(waiting)}."
    )


if __name__ == "__main__":
    run(reproduce)
