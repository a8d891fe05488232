"""How an engine's processes are started, and which variables start none."""

from __future__ import annotations

import os

import pytest

from hisparsed.engine.environment import (
    environment_problems,
    refuse_unreadable,
    set_process_start,
)
from hisparsed.errors import UserError


@pytest.mark.parametrize("before", [{}, {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}])
def test_processes_are_spawned_with_our_plugin(before: dict[str, str]) -> None:
    environ = dict(before)
    assert environment_problems(environ) == []
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


def test_plugins_without_ours_are_refused_before_anything_is_loaded() -> None:
    for found in ("hisparsed", "other,hisparsed"):
        set_process_start({"VLLM_PLUGINS": found})
    for found in ("", "other", "hisparsed2"):
        with pytest.raises(UserError, match=r"VLLM_PLUGINS: .* leaves hisparsed out"):
            set_process_start({"VLLM_PLUGINS": found})


@pytest.mark.parametrize("port", ["http", "", "0", "65536", "-1", "8000.0", "9" * 5000, "٣"])
def test_a_port_that_is_none_is_refused_by_name(port: str) -> None:
    with pytest.raises(
        UserError,
        match=r"VLLM_PORT: .* is not a port; unset it, or set 1 to 65535",
    ):
        set_process_start({"VLLM_PORT": port})


def test_a_link_of_kubernetes_is_left_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"VLLM_PORT": "tcp://10.0.0.1:8000"}
    assert environment_problems(environ) == []
    set_process_start(environ)
    assert "VLLM_PORT" not in environ
    assert "enableServiceLinks: false" in caplog.text


def test_a_port_is_left_to_vllm() -> None:
    environ = {"VLLM_PORT": "8000"}
    set_process_start(environ)
    assert environ["VLLM_PORT"] == "8000"


@pytest.mark.engine
def test_a_variable_that_vllm_cannot_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "VLLM_ENGINE_READY_TIMEOUT_S"
    monkeypatch.setenv("VLLM_OF_NOBODY", "soon")
    monkeypatch.setenv(name, "20")
    refuse_unreadable(os.environ)
    monkeypatch.setenv(name, "soon")
    with pytest.raises(UserError, match=f'{name}: vLLM cannot read "soon"'):
        refuse_unreadable(os.environ)
