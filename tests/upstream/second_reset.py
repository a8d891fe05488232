"""A second reset of the connector before the next step ends the engine.

``OffloadingConnectorScheduler.reset_cache`` notes the jobs in flight, so that the next step flushes
them, and asserts that nothing is noted yet. A reset while a transfer is in flight leaves them
noted until a step is scheduled; an idle engine schedules none.
"""

from __future__ import annotations

import traceback

from tests.upstream.outcome import run
from tests.upstream.stock import Shape, Workers, stock_engine, text


def reproduce() -> str | None:
    with stock_engine(Shape()) as core:
        workers = Workers(core)
        workers.hold = True
        call = workers.add(text(120, "stored"), 2)
        while call in workers.unfinished:
            workers.step()
        workers.step()
        assert workers.jobs, "nothing but the store is left to do"
        assert workers.scheduler.reset_prefix_cache(False, True)
        try:
            workers.scheduler.reset_prefix_cache(False, True)
        except AssertionError as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            return (
                "The second reset_prefix_cache(reset_connector=True) before a step fails in "
                f"{where.name}: {where.line}."
            )
    return None


if __name__ == "__main__":
    run(reproduce)
