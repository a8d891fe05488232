"""Events between a look-up and its load, where vLLM begins the load a step later.

As a program, `put_off_loads.py FOLDER`: every case on vLLM's asynchronous scheduler with two steps
in flight, one line of JSON. Before 0.33 vLLM puts nothing off; ``put_loads_off`` does it then.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from conversations import apply, build_engine, report, text
from scripted_workers import SMALL_NODE, ScriptedWorkers

from hisparsed.engine.host.offload import find_offloading_scheduler

PROMPT = text(200, seed="comes again")
BLOCKS = 40


def put_loads_off(scheduler: Any, set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Let a load begin once the step of its look-up has ended, as vLLM does since 0.33."""
    connector = scheduler.connector
    begin, take = connector.update_state_after_alloc, scheduler.update_from_output
    finish = scheduler.finish_requests
    put_off: dict[str, int] = {}

    def later(request: Any, blocks: Any, tokens: int) -> None:
        if tokens:
            put_off[request.request_id] = tokens
        else:
            begin(request, blocks, tokens)

    def take_output(*output: Any) -> Any:
        for name in list(put_off):
            request, tokens = scheduler.requests[name], put_off.pop(name)
            begin(request, scheduler.kv_cache_manager.get_blocks(name), tokens)
        return take(*output)

    def finish_requests(name: str, status: Any) -> Any:
        if put_off.pop(name, None) is not None:
            scheduler.finished_recving_kv_req_ids.add(name)
        return finish(name, status)

    set_attribute(scheduler, "deferred_loads", put_off)
    set_attribute(connector, "update_state_after_alloc", later)
    set_attribute(scheduler, "update_from_output", take_output)
    set_attribute(scheduler, "finish_requests", finish_requests)


def shrink(engine: Any, workers: ScriptedWorkers, call: str) -> None:
    apply(engine, {"offload_target_blocks": 0})
    kept = report(engine)["draining_blocks"]
    assert 0 < kept == report(engine)["offload"]["lent_blocks"], "what was found stays"


def evict(engine: Any, workers: ScriptedWorkers, call: str) -> None:
    """Stores take all the room that there is."""
    from vllm.v1.kv_offload.base import make_offload_key

    offload = workers.host.offload
    context = find_offloading_scheduler(workers.scheduler.connector)._req_status[call].req_context
    room = offload.free_slots + offload.evictable_chunks
    keys = [make_offload_key(b"%032d" % number, 0) for number in range(room + 1)]
    assert offload.prepare_store(keys, context) is None, "what was found is no room"
    taken = offload.prepare_store(keys[1:], context)
    offload.complete_store(taken.keys_to_store, context, success=False)


def reset(engine: Any, workers: ScriptedWorkers, call: str) -> None:
    workers.scheduler.reset_prefix_cache(False, True)
    assert report(engine)["offload"]["stored_chunks"] == 0
    assert call not in workers.scheduler.deferred_loads


def abort(engine: Any, workers: ScriptedWorkers, call: str) -> None:
    workers.cancel(call)
    apply(engine, {"offload_target_blocks": 0})
    assert report(engine)["offload"]["lent_blocks"] == 0, "nobody keeps what was found"


def no_move(engine: Any, workers: ScriptedWorkers, call: str) -> None:
    """Only the load."""


CASES = (no_move, shrink, evict, reset, abort)


def run_case(
    case: Callable[[Any, ScriptedWorkers, str], None], engine: Any, workers: ScriptedWorkers
) -> int:
    """Tokens that the call which comes again had loaded in the end."""
    apply(engine, {"offload_target_blocks": BLOCKS})
    workers.admit(PROMPT, 2)
    workers.run()
    pool = workers.scheduler.kv_cache_manager.block_pool
    assert pool.reset_prefix_cache()
    workers.admit(text(40, seed="runs meanwhile"), 30)
    for _ in range(3):
        workers.step()
    before = workers.schedule()
    call = workers.admit(PROMPT, 2)
    step = workers.schedule()
    assert call in workers.scheduler.deferred_loads
    request = workers.scheduler.requests[call]
    workers.check()
    case(engine, workers, call)
    workers.check()
    workers.answer(before)
    workers.check()
    workers.answer(step)
    workers.hold_offload = True
    workers.step()
    loads = [job for job in workers.jobs.values() if job.is_load]
    tokens = int(request.num_computed_tokens) if loads else 0
    workers.hold_offload = False
    workers.run()
    workers.check()
    assert workers.host.offload.in_flight_chunks == 0
    return tokens


def main() -> None:
    engine = build_engine(Path(sys.argv[1]), replace(SMALL_NODE, overlap=True))
    workers = ScriptedWorkers(engine)
    scheduler = workers.scheduler
    itself = bool(getattr(scheduler, "defer_async_loads", False))
    if not itself:
        put_loads_off(scheduler, setattr)
    loaded = {}
    for case in CASES:
        loaded[case.__name__] = run_case(case, engine, workers)
        apply(engine, {"offload_target_blocks": 0})
        assert scheduler.reset_prefix_cache(False, True)
        workers.run()
    most = scheduler.vllm_config.max_concurrent_batches
    print(json.dumps({"itself": itself, "steps": most, "loaded": loaded}))  # noqa: T201


if __name__ == "__main__":
    main()
