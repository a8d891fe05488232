"""The doctor of a node that serves: what is kept from the start, and what is looked at again."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hisparsed.config.node import NodeConfig
from hisparsed.control.status.document import DoctorFinding, Severity
from hisparsed.engine.cuda.nvml import slow_reasons
from hisparsed.operations import machine as machine_module
from hisparsed.operations.doctor import AbsentDoctor, NodeDoctor
from hisparsed.operations.machine import Gpu, ShmFile, slow_words

GIB = 2**30
LEAK = ShmFile(Path("/dev/shm/vllm_offload_a"), GIB, held=False)  # noqa: S108 (only a name)


def bad(doctor: NodeDoctor) -> dict[str, DoctorFinding]:
    return {one.check: one for one in doctor.findings if one.severity is not Severity.OK}


def later(**changes: Any) -> Any:
    """The values of a later look: ten minutes on, with ``changes``."""
    return lambda before, _config: replace(before, unix_s=before.unix_s + 600, **changes)


def test_what_a_node_answers_by_running_is_not_told(ask: Any) -> None:
    taken = {
        "taken_ports": ("api.port: taken",),
        "state_trouble": "state_dir: in use",
        "dead_folder": Path("/run/old"),
    }
    assert bad(NodeDoctor(ask(taken))) == {}


def test_what_cannot_change_stays_with_the_time_it_was_seen(ask: Any) -> None:
    doctor = NodeDoctor(ask({"memlock_bytes": 0}), again=later(memlock_bytes=None))
    doctor.look()
    assert bad(doctor)["memlock"].seen_unix_s == 1_000_000.0


@pytest.mark.parametrize(
    ("check", "changes"),
    [
        ("leaked-memory", {"shared_files": (LEAK,)}),
        ("journal-disk", {"disk_free_bytes": 0}),
        ("clock", {"clock_kept": False}),
        ("gpu-clocks", {"gpus": (Gpu("NVIDIA H200", 141 * GIB, 0, 0, ("heat",)),)}),
        ("memory-left", {"available_bytes": 2048 * GIB // 50 - 1}),
        ("shared-memory-left", {"shm_free_bytes": 256 * 2**20 - 1}),
    ],
)
def test_what_can_change_is_looked_at_again(ask: Any, check: str, changes: dict[str, Any]) -> None:
    doctor = NodeDoctor(ask(), again=later(**changes))
    assert bad(doctor) == {}
    doctor.look()
    assert list(bad(doctor)) == [check]
    found = bad(doctor)[check]
    assert found.seen_unix_s == 1_000_600.0
    assert found.what
    assert found.why
    assert found.fix


@pytest.mark.parametrize(
    ("total", "free", "found"),
    [
        (2 * GIB, 2 * GIB // 10 - 1, ["memory-left"]),
        (2 * GIB, 2 * GIB // 10 + 1, []),
        (20 * GIB, GIB // 2 - 1, ["memory-left"]),
        (20 * GIB, GIB // 2, []),
    ],
)
def test_a_small_memory_is_reported_before_its_last_percent(
    ask: Any, total: int, free: int, found: list[str]
) -> None:
    first = ask({"memory_bytes": total, "available_bytes": total}, host_budget="64MiB")
    doctor = NodeDoctor(first, again=lambda before, _: replace(before, available_bytes=free))
    doctor.look()
    assert [name for name in bad(doctor) if name == "memory-left"] == found


def test_memory_that_the_node_took_is_no_finding(ask: Any) -> None:
    doctor = NodeDoctor(ask(), again=later(available_bytes=2048 * GIB // 50 + 1))
    doctor.look()
    assert bad(doctor) == {}


def test_what_the_journal_takes_already_is_not_asked_of_the_disk_again(ask: Any) -> None:
    used = {"disk_free_bytes": 500 * 2**20, "journal_bytes": 12 * 2**20}
    assert bad(NodeDoctor(ask(used))) == {}
    assert list(bad(NodeDoctor(ask(used | {"journal_bytes": 12 * 2**20 - 1})))) == ["journal-disk"]


def test_heat_slows_a_gpu_down_and_its_power_limit_does_not_count() -> None:
    assert slow_words(slow_reasons(0x1 | 0x4)) == ()
    slow = slow_words(slow_reasons(0x4 | 0x40 | 0x80))
    assert slow == ("heat (hardware)", "the power supply's brake")


def test_a_look_beside_this_node_takes_no_port_and_works_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setattr(machine_module, "SHM", shm)
    document = tmp_path / "hisparsed.yaml"
    document.touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = NodeConfig.model_validate(
            {
                "node": "reference",
                "host_budget": "64MiB",
                "api": {"port": taken.getsockname()[1]},
                "control_socket": str(tmp_path / "control.sock"),
                "state_dir": str(tmp_path / "state"),
                "journal": {"max_size": "1024TiB"},
            }
        )
        doctor = NodeDoctor.before_start(config, document, "reference")
        assert "journal-disk" in bad(doctor)
        assert "leaked-memory" not in bad(doctor)
        state = tmp_path / "state"
        state.mkdir()
        (shm / "vllm_offload_a.mmap").write_bytes(b"x" * 8192)
        (state / "journal.sqlite").write_bytes(b"x" * 100)
        monkeypatch.setattr(machine_module, "bind_tcp", refuse)
        monkeypatch.setattr(machine_module, "state_lock", refuse)
        looking = threading.Thread(target=doctor.look)
        looking.start()
        looking.join()
    assert "leaked-memory" in bad(doctor)


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("a look beside a node takes nothing")


def test_a_machine_that_cannot_be_looked_at_is_a_finding() -> None:
    doctor = AbsentDoctor(FileNotFoundError("/dev/shm"), at_unix_s=7.0)  # noqa: S108
    (found,) = doctor.look()
    assert (found.severity, found.seen_unix_s) == (Severity.WARNING, 7.0)
    assert "FileNotFoundError" in found.what
