"""A store of a finished call reads a GPU block that a later call is about to write.

``OffloadingConnectorScheduler`` flushes a finished call's stores once one of their blocks is handed
out again, but it looks at the cache groups that it offloads. With HiSparse that is the indexer's
group alone; resident and hot groups take blocks from the same GPU pool. The chunk then holds rows
of another call, and every later hit on it is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.upstream.outcome import run
from tests.upstream.stock import Shape, Workers, stock_engine, text

SHAPE = Shape(gpu_blocks=100)
CALLS = 8
STEPS = 100


def new_gpu_blocks(output: Any, groups: list[int]) -> Iterator[tuple[int, int]]:
    """Cache group and number of each block that the step has given to a call."""
    tables = [one.block_ids for one in output.scheduled_new_reqs]
    tables += [one for one in output.scheduled_cached_reqs.new_block_ids if one is not None]
    for table in tables:
        for group in groups:
            yield from ((group, block) for block in table[group] if block)


def reproduce() -> str | None:
    with stock_engine(SHAPE) as core:
        workers = Workers(core)
        groups = core.scheduler.kv_cache_config.kv_cache_groups
        on_gpu = [number for number, one in enumerate(groups) if not one.host_resident]
        workers.hold = True
        for seed in range(CALLS):
            workers.add(text(100 + 7 * seed, seed), 4)
        for step in range(STEPS):
            output = workers.schedule()
            in_flight = dict(workers.jobs)
            workers.answer(output)
            read_by = {
                block: number
                for number, job in in_flight.items()
                if number not in workers.loads | workers.flushed
                for block in job.src_spec.block_ids.tolist()
            }
            for group, block in new_gpu_blocks(output, on_gpu):
                if block not in read_by:
                    continue
                job = read_by[block]
                kind = type(groups[group].kv_cache_spec).__name__
                return (
                    f"Step {step} gives GPU block {block} to cache group {group} ({kind}), while "
                    f"store job {job} of the finished call {in_flight[job].req_id} reads it; the "
                    f"step flushes {sorted(workers.flushed) or 'no job'}."
                )
            if not workers.unfinished:
                break
    return None


if __name__ == "__main__":
    run(reproduce)
