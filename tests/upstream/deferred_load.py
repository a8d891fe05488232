"""An eviction or a reset between a look-up and its load ends the engine (since 0.33).

With HiSparse, two steps in flight and a connector that is a consumer, ``Scheduler.schedule`` puts
an asynchronous load off (``deferred_loads``) and ``update_from_output`` begins it a step later
(``_drain_deferred_loads``). Nothing keeps the chunks that the look-up has found: stores of the same
pass may evict them, and a connector reset drops them. ``prepare_load`` then asserts.
"""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import Any

from tests.upstream.outcome import logged_errors, run
from tests.upstream.stock import Shape, Workers, stock_engine, text

SHAPE = Shape(overlap=True, offload_bytes=14 * 8192)
LOGGER = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"
PROMPT = text(200, "comes again")


def until_put_off(core: Any) -> tuple[Workers, Any] | None:
    """A call whose load was put off, and the step that is answered first; ``None`` if none is."""
    workers = Workers(core)
    workers.add(PROMPT, 1)
    assert workers.run()
    workers.forget_gpu_prefixes()
    workers.add(text(20, "runs meanwhile"), 60)
    for _ in range(3):
        workers.step()
    before = workers.schedule()
    call = workers.add(PROMPT, 1)
    workers.add(text(64, "is stored"), 1)
    workers.schedule()
    put_off = call in getattr(workers.scheduler, "deferred_loads", {})
    return (workers, before) if put_off else None


def ended_by(*, reset: bool) -> str | None:
    with stock_engine(SHAPE) as core:
        state = until_put_off(core)
        if state is None:
            return None
        workers, before = state
        if reset:
            workers.scheduler.reset_prefix_cache(False, True)
        try:
            workers.answer(before)
        except AssertionError as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            return f"{where.name} fails: {where.line}"
    return None


def left_locked() -> str | None:
    """What is logged where nothing comes between: the tier has room."""
    with (
        stock_engine(replace(SHAPE, offload_bytes=8 << 20)) as core,
        logged_errors(LOGGER) as lines,
    ):
        state = until_put_off(core)
        if state is not None:
            workers, before = state
            workers.answer(before)
            workers.schedule()
    return next((f"an ERROR in the log: {line}" for line in lines if "lock" in line), None)


def reproduce() -> str | None:
    found = {
        "Stores of the same pass": ended_by(reset=False),
        "A reset of the connector": ended_by(reset=True),
        "Nothing in between": left_locked(),
    }
    return "; ".join(f"{what}: {how}" for what, how in found.items() if how) or None


if __name__ == "__main__":
    run(reproduce)
