"""How an engine's processes are started, and what the handle of a running engine adds."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from hisparsed.control.loop import ControlLoop
from hisparsed.engine.launch import EngineHandle, set_process_start, start_method_problem
from hisparsed.engine.port import ServingCounters
from hisparsed.errors import UserError


@pytest.mark.parametrize("before", [{}, {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}])
def test_processes_are_spawned_with_our_plugin(before: dict[str, str]) -> None:
    environ = dict(before)
    assert start_method_problem(environ) is None
    set_process_start(environ)
    assert environ == {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "HISPARSED_ENGINE": "1",
        "HISPARSED_DAEMON_GROUP": str(os.getpgrp()),
    }
    set_process_start(environ)


@pytest.mark.parametrize("method", ["fork", "forkserver", "Spawn", ""])
def test_another_start_method_is_refused_by_name(method: str) -> None:
    environ = {"VLLM_WORKER_MULTIPROC_METHOD": method}
    with pytest.raises(UserError) as refused:
        set_process_start(environ)
    assert f"VLLM_WORKER_MULTIPROC_METHOD: {method!r}" in str(refused.value)
    assert "unset it, or set it to spawn" in str(refused.value)
    assert "HISPARSED_ENGINE" not in environ


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
