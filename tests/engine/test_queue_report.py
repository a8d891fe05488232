"""What a report says of the queue: what its head was refused for, and how long calls wait."""

from __future__ import annotations

from pathlib import Path

import pytest
from conversations import EngineShape, apply, ask, build_engine, core_of, finish, report, text

pytestmark = pytest.mark.engine


def test_the_head_says_what_it_needs_until_it_starts_and_how_long_it_waits(tmp_path: Path) -> None:
    engine = build_engine(tmp_path, EngineShape(gpu_blocks=170, max_num_seqs=4, max_model_len=1024))
    scheduler = core_of(engine).scheduler
    now_s = [1_000.0]
    scheduler.wall_clock_s = lambda: now_s[0]
    apply(engine, {"offload_target_blocks": 100, "multiplier": 1.0})
    idle = report(engine)
    assert (idle["gpu_head_need_blocks"], idle["requests"]["oldest_wait_s"]) == (None, None)
    for name in ("first", "second", "third"):
        ask(engine, name, text(700, seed=name), 30)
    for _ in range(12):
        engine.step()
    (head,) = scheduler.waiting
    head.arrival_time = 990.0
    short = report(engine)
    assert short["gpu_head_need_blocks"] > short["gpu_free_blocks"]
    assert short["gpu_head_need_blocks"] < 170, "a call that could never start would be no need"
    assert short["requests"]["oldest_wait_s"] == 10.0
    head.num_preemptions = 1
    assert report(engine)["requests"]["oldest_wait_s"] is None, "it has run meanwhile"
    finish(engine)
    done = report(engine)
    assert (done["gpu_head_need_blocks"], done["requests"]["oldest_wait_s"]) == (None, None)


def test_a_limit_is_no_need_of_blocks(tmp_path: Path) -> None:
    engine = build_engine(tmp_path, EngineShape())
    apply(engine, {"offload_target_blocks": 100, "admission": {"max_running": 1}})
    for name in ("first", "second"):
        ask(engine, name, text(100, seed=name), 30)
    engine.step()
    seen = report(engine)
    assert (seen["requests"]["waiting"], seen["gpu_head_need_blocks"]) == (1, None)
