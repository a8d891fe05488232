"""What the handle of a running engine adds to the engine's own figures."""

from __future__ import annotations

from types import SimpleNamespace

from hisparsed.control.engine_port import ServingCounters
from hisparsed.engine.handle import EngineHandle


def handle() -> EngineHandle:
    logger = SimpleNamespace(counters=lambda: ServingCounters(prompt_tokens=5))
    return EngineHandle(SimpleNamespace(errored=False), logger)


def test_refused_calls_are_unknown_until_somebody_counts_them() -> None:
    assert handle().serving() == ServingCounters(prompt_tokens=5, refused=None)


def test_refused_calls_are_counted_anew_at_each_look() -> None:
    counts = iter([2, 7])
    engine = handle()
    engine.refused_calls = lambda: next(counts)
    assert [engine.serving().refused, engine.serving().refused] == [2, 7]
