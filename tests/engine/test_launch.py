"""What the handle of a running engine adds."""

from __future__ import annotations

from types import SimpleNamespace

from hisparsed.control.loop import ControlLoop
from hisparsed.engine.launch import EngineHandle
from hisparsed.engine.port import ServingCounters


def handle() -> EngineHandle:
    logger = SimpleNamespace(counters=lambda: ServingCounters(prompt_tokens=5))
    return EngineHandle(SimpleNamespace(errored=False), logger)


def test_refused_calls_are_unknown_until_somebody_counts_them() -> None:
    assert handle().serving() == ServingCounters(prompt_tokens=5, refused=None)


def test_refused_calls_are_counted_anew_at_each_look() -> None:
    counts = iter([2, 7])
    loop = ControlLoop.__new__(ControlLoop)
    loop._engine, loop._refused = handle(), lambda: next(counts)
    assert [loop._serving().refused, loop._serving().refused] == [2, 7]
