"""`hisparsed doctor` on this machine: what it reads, what it removes, how it ends, how fast."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hisparsed.control.status.document import Severity
from hisparsed.node.resources import state_lock
from hisparsed.operations import doctor as doctor_module
from hisparsed.operations import machine as machine_module
from hisparsed.operations.checks import Finding
from hisparsed.operations.doctor import visit
from hisparsed.policy.problems import ConfigError


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def document(tmp_path: Path, free_port: int) -> Path:
    path = tmp_path / "hisparsed.yaml"
    text = {
        "node": "reference",
        "host_budget": "64MiB",
        "api": {"port": free_port},
        "metrics": {"port": free_port},
        "control_socket": str(tmp_path / "control.sock"),
        "state_dir": str(tmp_path / "state"),
        "policy": "policy.yaml",
    }
    path.write_text(yaml.safe_dump(text))
    (tmp_path / "policy.yaml").write_text("version: 1\n")
    return path


@pytest.fixture(autouse=True)
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own in place of /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(machine_module, "SHM", folder)
    return folder


def look(document: Path, *, fix: bool = False) -> dict[str, Finding]:
    return {one.check: one for one in visit(document, list, fix=fix).findings}


def test_it_takes_nothing_and_makes_nothing(document: Path) -> None:
    before = sorted(document.parent.rglob("*"))
    found = look(document)
    assert sorted(document.parent.rglob("*")) == before
    assert found["ports"].severity is Severity.OK
    assert found["daemon"].severity is Severity.OK


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "there is no such file"),
        ("version: 1\nmode: of\n", 'policy.yaml:2: mode: "of" is not one of act, advise, off'),
    ],
    ids=["missing", "mistaken"],
)
def test_a_policy_that_would_end_the_start_is_told(
    document: Path, tmp_path: Path, text: str | None, says: str
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.unlink() if text is None else policy.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(says)):
        visit(document, list, fix=False)


def test_a_start_method_that_the_start_refuses_is_told(
    document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    assert look(document)["engine"].severity is Severity.OK
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    found = look(document)["engine"]
    assert found.severity is Severity.FATAL
    assert "VLLM_WORKER_MULTIPROC_METHOD: 'fork'" in found.what


def test_a_leak_is_told_and_swept_on_request(document: Path, shm: Path) -> None:
    leak = shm / "vllm_offload_a.mmap"
    leak.write_bytes(b"x" * 8192)
    told = look(document)["leaked-memory"]
    assert (told.severity, told.fixed) == (Severity.WARNING, False)
    assert leak.exists(), "nothing is removed unasked"
    assert look(document, fix=True)["leaked-memory"].fixed
    assert not leak.exists()
    assert look(document)["leaked-memory"].severity is Severity.OK


def test_memory_of_a_live_engine_stays(document: Path, shm: Path) -> None:
    alive = shm / "vllm_offload_b.mmap"
    with alive.open("wb+"):
        assert look(document, fix=True)["leaked-memory"].severity is Severity.OK
        assert alive.exists()


def test_the_folder_of_a_killed_daemon_is_removed(document: Path, tmp_path: Path) -> None:
    state, left = tmp_path / "state", tmp_path / "hisparsed-run-x"
    state.mkdir()
    left.mkdir()
    (state / "runtime-folder").write_text(str(left))
    assert look(document)["dead-daemon"].severity is Severity.NOTE
    assert look(document, fix=True)["dead-daemon"].fixed
    assert not left.exists()


def test_the_folder_of_a_live_daemon_stays(document: Path, tmp_path: Path) -> None:
    state, used = tmp_path / "state", tmp_path / "hisparsed-run-x"
    state.mkdir()
    used.mkdir()
    (state / "runtime-folder").write_text(str(used))
    with state_lock(state):
        found = look(document, fix=True)
    assert found["dead-daemon"].severity is Severity.OK
    assert found["daemon"].severity is Severity.FATAL
    assert "belongs to a running daemon" in found["daemon"].what
    assert used.exists()


def test_a_taken_port_is_named(document: Path, free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)):
        found = look(document)["ports"]
    assert found.severity is Severity.FATAL
    assert f"api.port: 127.0.0.1:{free_port} is taken" in found.what


def test_a_daemon_on_the_socket_is_seen(document: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "control.sock"))
        other.listen()
        assert look(document)["daemon"].severity is Severity.FATAL


def cuda_document(document: Path, model: Path, **changes: Any) -> Path:
    text = yaml.safe_load(document.read_text())
    document.write_text(yaml.safe_dump(text | {"node": "cuda", "model": str(model)} | changes))
    return document


def test_a_gpu_node_without_a_gpu_is_judged_in_all_else(
    document: Path, tmp_path: Path, free_port: int
) -> None:
    facts = {
        "model_type": "glm_moe_dsa",
        "index_topk": 2048,
        "num_hidden_layers": 78,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "max_position_embeddings": 202_752,
    }
    (tmp_path / "glm").mkdir()
    (tmp_path / "glm" / "config.json").write_text(json.dumps(facts))
    cuda_document(
        document,
        tmp_path / "glm",
        cuda={"tensor_parallel_size": 8, "max_model_len": 400_000},
        engine_args={"block_size": 16},
    )
    with socket.create_server(("127.0.0.1", free_port)):
        findings = visit(document, list, fix=False).findings
    fatal = [(one.check, one.what) for one in findings if one.severity is Severity.FATAL]
    said = "\n".join(what for _, what in fatal)
    assert [check for check, _ in fatal if check in ("node", "gpus")] == ["node"]
    assert "no NVIDIA GPU can be seen" in said
    assert "engine_args.block_size: the CUDA node sets it itself" in said
    assert "cuda.max_model_len: the model knows 202752 positions" in said
    assert "host_budget: 64MiB cannot hold one request" in said
    assert f"api.port: 127.0.0.1:{free_port} is taken" in said


def test_a_model_that_is_not_there_is_told_beside_the_missing_gpu(
    document: Path, tmp_path: Path
) -> None:
    cuda_document(document, tmp_path / "nowhere")
    found = look(document)
    assert found["node"].severity is Severity.FATAL
    assert found["engine"].severity is Severity.FATAL
    assert str(tmp_path / "nowhere") in found["engine"].what


def test_a_gpu_without_a_model_is_judged_as_the_node_it_would_be(document: Path) -> None:
    text = yaml.safe_load(document.read_text()) | {"node": "auto"}
    document.write_text(yaml.safe_dump(text))
    told = visit(document, lambda: ["NVIDIA H200"], fix=False)
    (node,) = [one for one in told.findings if one.check == "node"]
    assert node.severity is Severity.FATAL
    assert "no model is configured" in node.what
    assert told.node.startswith("cuda node of ")


def test_a_budget_beyond_the_machine_is_a_finding(document: Path) -> None:
    text = yaml.safe_load(document.read_text()) | {"host_budget": "900TiB"}
    document.write_text(yaml.safe_dump(text))
    assert look(document)["memory"].severity is Severity.FATAL


def run(document: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hisparsed", "doctor", "--config", str(document), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_ends_with_the_worst_and_speaks_json(document: Path, tmp_path: Path) -> None:
    sound = run(document, "--json", "--fatal-only")
    assert sound.returncode == 0, sound.stderr
    told = json.loads(sound.stdout)
    assert told["node"].startswith("reference node of ")
    assert {"check", "severity", "what", "why", "fix", "fixed"} == set(told["findings"][0])

    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "control.sock"))
        other.listen()
        fatal = run(document)
    assert fatal.returncode == 3
    assert fatal.stdout.startswith("fatal")


def test_a_document_with_a_mistake_is_wrong_input(document: Path) -> None:
    document.write_text("host_budget: 44 MB/s\n")
    result = run(document)
    assert result.returncode == 2
    assert "44 MB/s" in result.stderr


def test_it_imports_no_engine(document: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from hisparsed.operations.doctor import visit\n"
        "from hisparsed.config.machine import nvidia_gpus\n"
        "visit(Path(sys.argv[1]), nvidia_gpus, fix=False)\n"
        "print(sorted({'torch', 'vllm', 'numpy', 'transformers'} & sys.modules.keys()))\n"
    )
    command = [sys.executable, "-c", code, str(document)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout == "[]\n", result.stderr


def test_a_gpu_answers_through_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    class Memory:
        total, used = 141 * 2**30, 5

    fakes: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.82.07",
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda handle: Memory,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: ["one"],
        "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(pynvml, name, fake)
    driver, (gpu,) = machine_module._gpus()
    assert driver == "580.82.07"
    assert (gpu.name, gpu.used_bytes, gpu.processes) == ("NVIDIA H200", 5, 1)


def test_only_what_is_gone_is_called_fixed(
    document: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shm / "vllm_offload_a.mmap").write_bytes(b"x")
    monkeypatch.setattr(doctor_module, "sweep", lambda file: False)
    assert not look(document, fix=True)["leaked-memory"].fixed
    shutil.rmtree(shm)
