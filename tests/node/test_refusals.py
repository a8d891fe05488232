"""Refusals of a node and of a replay: exit code 2, one clear message, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from serve_process import (
    NodeFiles,
    ServeProcess,
    hisparsed,
    message_of,
    policy_document,
    refusal,
    serve,
)

from hisparsed.config.machine import nvidia_gpus
from hisparsed.demo.node import free_port


def long(*values: Any) -> Any:
    """Each of these is a process; the refusals have quick tests in other folders."""
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host_bugdet": "1GiB"}, ("host_bugdet", "host_budget")),
        long({"host_budget": "24MB/s"}, ("host_budget", '"24MB/s"')),
        long({"host_budget": "900TiB"}, ("host_budget", "900TiB", "this machine")),
        long({"api": {"host": "0.0.0.0"}}, ("api.host", "api_key_file")),  # noqa: S104 (refused)
        long({"engine_args": {"scheduler_cls": "x.Y"}}, ("engine_args.scheduler_cls",)),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_node_document_names_the_line_and_what_is_right(
    files: NodeFiles, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    files.document |= changes
    message = refusal(files)
    line = next(
        number
        for number, text in enumerate(files.config_path.read_text("utf-8").splitlines(), 1)
        if words[0].rpartition(".")[2] in text
    )
    assert f"hisparsed.yaml:{line}: " in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tock": "1s"}, ("tock", "tick")),
        long({"tick": "1GiB"}, ("tick", '"1GiB"')),
        long({"hot": {"min": 5, "max": 4}}, ("hot.max", "5", "4")),
        long(
            {"pools": {"offload": {"floor": "60%", "ceiling": "50%"}}},
            ("pools.offload.ceiling",),
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_policy_stops_the_start_before_the_state_folder_is_made(
    files: NodeFiles, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    files.write_policy(policy_document(**changes))
    message = refusal(files)
    assert "policy.yaml:" in message
    for word in words:
        assert word in message
    assert not files.state_dir.exists()


def test_a_budget_that_holds_no_request_says_how_much_does(files: NodeFiles) -> None:
    files.document["host_budget"] = "1MiB"
    message = refusal(files)
    assert "host_budget: 1MiB cannot hold one request" in message
    assert "give at least 2.05MiB" in message
    assert not files.state_dir.exists()


@pytest.mark.parametrize("name", [long("config_path"), "policy_path"])
def test_a_document_that_is_missing_is_named(files: NodeFiles, name: str) -> None:
    path: Path = getattr(files, name)
    path.unlink()
    message = message_of(serve(files))
    assert str(path) in message
    assert "there is no such file" in message
    assert not files.state_dir.exists()


def test_a_state_folder_under_a_file_is_refused(files: NodeFiles) -> None:
    blocker = files.folder / "file"
    blocker.write_text("in the way", encoding="utf-8")
    files.document["state_dir"] = str(blocker / "state")
    message = refusal(files)
    assert f"state_dir: {blocker / 'state'} cannot be used" in message


def test_a_control_socket_path_that_is_a_file_is_refused_and_kept(files: NodeFiles) -> None:
    files.socket.write_text("precious", encoding="utf-8")
    files.write_config()
    assert f"control_socket: {files.socket}" in message_of(serve(files))
    assert files.socket.read_text("utf-8") == "precious"


def test_a_control_socket_path_that_is_too_long_is_refused(files: NodeFiles) -> None:
    files.document["control_socket"] = str(files.folder / ("s" * 110))
    assert "is longer than the 107 bytes" in refusal(files)
    assert not files.state_dir.exists()


@pytest.mark.skipif(bool(nvidia_gpus()), reason="this machine has a GPU")
def test_a_cuda_node_without_a_gpu_is_refused(files: NodeFiles) -> None:
    files.document |= {"node": "cuda", "model": "some/model"}
    message = refusal(files)
    assert "no NVIDIA GPU can be seen" in message
    assert "node: reference" in message


@pytest.mark.parametrize("method", ["fork", long("forkserver")])
def test_a_start_method_that_shares_too_much_is_refused(files: NodeFiles, method: str) -> None:
    serve = ServeProcess(files, VLLM_WORKER_MULTIPROC_METHOD=method)
    try:
        assert serve.wait() == 2
        message = f"hisparsed: VLLM_WORKER_MULTIPROC_METHOD: {method!r} starts no engine"
        assert message in serve.log()
        assert "unset it, or set it to spawn" in serve.log_end()
        assert not files.state_dir.exists()
    finally:
        serve.kill()


def test_a_replay_of_a_missing_trace_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "none.jsonl"
    message = message_of(hisparsed("replay", "--trace", str(trace), "--dry-run"))
    assert str(trace) in message


def test_a_replay_of_a_torn_trace_names_the_line(tmp_path: Path) -> None:
    trace = tmp_path / "torn.jsonl"
    whole = {"timestamp": 0, "input_length": 64, "output_length": 4, "hash_ids": [1]}
    trace.write_text(json.dumps(whole) + "\n" + json.dumps(whole)[:30], encoding="utf-8")
    message = message_of(hisparsed("replay", "--trace", str(trace), "--dry-run"))
    assert "torn.jsonl: line 2: " in message


def test_a_replay_against_nothing_says_how_to_start_a_node() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    message = message_of(hisparsed("replay", "--url", url))
    assert f"nothing answers at {url}" in message
    assert "hisparsed serve" in message


@pytest.mark.parametrize("command", ["status", long("explain")])
def test_asking_where_no_node_is_names_the_socket(tmp_path: Path, command: str) -> None:
    path = tmp_path / "none.sock"
    assert str(path) in message_of(hisparsed(command, "--socket", str(path)))
