"""The environment that vLLM starts processes by: set for our engines, refused where it is not."""

from __future__ import annotations

import pytest

from hisparsed.engine.process_start import set_process_start, start_method_problem
from hisparsed.errors import UserError


@pytest.mark.parametrize("before", [{}, {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}])
def test_processes_are_spawned_with_our_plugin(before: dict[str, str]) -> None:
    environ = dict(before)
    assert start_method_problem(environ) is None
    set_process_start(environ)
    assert environ == {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "HISPARSED_ENGINE": "1"}
    set_process_start(environ)


@pytest.mark.parametrize("method", ["fork", "forkserver", "Spawn", ""])
def test_another_start_method_is_refused_by_name(method: str) -> None:
    environ = {"VLLM_WORKER_MULTIPROC_METHOD": method}
    with pytest.raises(UserError) as refused:
        set_process_start(environ)
    assert f"VLLM_WORKER_MULTIPROC_METHOD: {method!r}" in str(refused.value)
    assert "unset it, or set it to spawn" in str(refused.value)
    assert "HISPARSED_ENGINE" not in environ
