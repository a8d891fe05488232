"""What is known of an engine's processes: how they ended, that they end, and what they leave."""

from __future__ import annotations

import copy
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from hisparsed.engine.plugin import EXIT_PARENT_GONE, LAUNCHED_ENV, Guard
from hisparsed.errors import UserError
from hisparsed.node.engine.processes import (
    DAEMON_ENV,
    STATE_ENV,
    EngineProcesses,
    ProcessesSince,
    daemon_on,
    end_orphans,
    exit_text,
    orphans,
    started,
)
from hisparsed.node.run import _begin_alone

SLEEP = [sys.executable, "-c", "import signal; signal.pause()"]


def engine(ready: int, shared: str) -> None:
    """A process with a child and a piece of shared memory."""
    import mmap

    number = os.open(shared, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(number, 4096)
    mapped = mmap.mmap(number, 4096)
    worker = subprocess.Popen(SLEEP)
    os.write(ready, b"x")
    worker.wait()
    mapped.close()


@pytest.fixture
def shared() -> Iterator[Path]:
    path = Path("/dev/shm") / f"hisparsed-test-{uuid4().hex}"  # noqa: S108 (shared memory)
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def processes(shared: Path) -> Iterator[EngineProcesses]:
    since = ProcessesSince()
    seen, ready = os.pipe()
    context = multiprocessing.get_context("fork")
    root = context.Process(target=engine, args=(ready, str(shared)), name="EngineCore")
    root.start()
    os.read(seen, 1)
    found = since.look()
    yield found
    found.kill()
    found.wait(10)
    os.close(seen)
    os.close(ready)


def test_all_processes_of_an_engine_are_found_and_nobody_else_s(
    processes: EngineProcesses,
) -> None:
    assert [one.name for one in processes.roots] == ["EngineCore"]
    assert [one.ppid() for one in processes.others] == [processes.roots[0].pid]
    assert ProcessesSince().look().roots == ()


def test_what_ended_between_two_looks_is_still_known(shared: Path) -> None:
    since = ProcessesSince()
    seen, ready = os.pipe()
    root = multiprocessing.get_context("fork").Process(target=engine, args=(ready, str(shared)))
    root.start()
    os.read(seen, 1)
    os.close(seen)
    os.close(ready)
    since.look()
    root.kill()
    root.join()
    found = since.look()
    assert found.killed
    assert "was killed by SIGKILL" in found.exits()[0]
    assert not found.wait(0.01), "its child holds memory still"
    assert found.end_within(0.2)
    assert found.free() == [str(shared)]


def compiling_engine(ready: int, compiler: str) -> None:
    """A process that has a kernel compiled, and waits."""
    with subprocess.Popen([compiler, "60"]) as worker:
        os.write(ready, b"x")
        worker.wait()


@pytest.mark.parametrize(("name", "compiles"), [("ptxas", True), ("another", False)])
def test_a_compiler_below_an_engine_is_seen(tmp_path: Path, name: str, compiles: bool) -> None:
    program = tmp_path / name
    program.symlink_to(shutil.which("sleep") or "")
    since = ProcessesSince()
    seen, ready = os.pipe()
    context = multiprocessing.get_context("fork")
    root = context.Process(target=compiling_engine, args=(ready, str(program)))
    root.start()
    os.read(seen, 1)
    found = since.look()
    try:
        assert found.compile() is compiles
    finally:
        found.end_within(10, kill=True)
        os.close(seen)
        os.close(ready)
    assert not found.compile(), "it has ended"


def test_killed_ones_end_and_say_how(processes: EngineProcesses) -> None:
    assert not processes.wait(0.01)
    assert "still runs" in processes.exits()[0]
    processes.kill()
    assert processes.wait(10)
    (how,) = processes.exits()
    assert f"EngineCore (pid {processes.roots[0].pid}) was killed by SIGKILL" in how
    assert processes.killed
    assert processes.exits(killed=True)[0].endswith("was killed by the daemon")


def test_shared_memory_is_removed_once_nobody_holds_it(
    processes: EngineProcesses, shared: Path
) -> None:
    assert str(shared) in {one.path for one in processes.shared}
    assert processes.free() == [], "it is in use"
    assert shared.exists()
    processes.kill()
    processes.wait(10)
    assert processes.free() == [str(shared)]
    assert not shared.exists()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "still runs"),
        (0, "ended with exit code 0"),
        (71, "ended with exit code 71"),
        (-signal.SIGTERM, "ended when asked to"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-signal.SIGKILL, "when memory runs out"),
        (-200, "was killed by signal 200"),
    ],
)
def test_exit_codes_are_told_in_words(code: int | None, words: str) -> None:
    assert words in exit_text(code)


BEFORE_ANY_PLUGIN = """
import multiprocessing, os, time
from hisparsed.engine.plugin import Guard

def begins(guard, told):
    told.send(os.getpid())
    time.sleep(600)

if __name__ == "__main__":
    told, tells = multiprocessing.Pipe()
    spawned = multiprocessing.get_context("spawn").Process(target=begins, args=(Guard(), tells))
    spawned.start()
    print(told.recv(), flush=True)
    os._exit(0)
"""


def test_an_engine_process_ends_with_its_daemon_before_any_plugin_is_loaded(tmp_path: Path) -> None:
    script = tmp_path / "daemon.py"
    script.write_text(BEFORE_ANY_PLUGIN, encoding="utf-8")
    # Returns when both have closed what they write to.
    daemon = run(str(script))
    assert "this process of it ends" in daemon.stderr
    assert int(daemon.stdout) > 0, "it was guarded while it ran"


def test_a_guard_of_a_daemon_that_is_gone_ends_what_reads_it_and_a_copy_ends_nobody() -> None:
    assert isinstance(copy.deepcopy(Guard()), Guard)
    ended = subprocess.Popen(SLEEP)
    ended.kill()
    ended.wait()
    reads = f"from hisparsed.engine.plugin import guarded_by; guarded_by({ended.pid}); print(1)"
    read = run("-c", reads)
    assert (read.returncode, read.stdout) == (EXIT_PARENT_GONE, "")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture
def left(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process as a daemon on ``tmp_path`` starts one, that cannot end without help."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"],
        stdout=subprocess.PIPE,
        env={**os.environ, "HISPARSED_ENGINE": "1", STATE_ENV: str(tmp_path)},
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    yield process
    process.kill()
    process.communicate()


def test_an_engine_process_without_its_daemon_is_found_and_ended(
    tmp_path: Path, left: subprocess.Popen[bytes]
) -> None:
    assert [one.pid for one in orphans(tmp_path)] == [left.pid]
    assert end_orphans(tmp_path) == [left.pid]
    assert left.wait(10) == -signal.SIGKILL
    assert orphans(tmp_path) == []
    assert end_orphans(tmp_path) == []


def test_an_engine_process_whose_daemon_lives_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the daemon has lost its lock, because somebody removed the state folder."""
    named = {LAUNCHED_ENV: "1", STATE_ENV: str(tmp_path), DAEMON_ENV: started(os.getpid())}
    begin = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]], stdin=0)"
    wait = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", begin, "-c", wait],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **named},
    ) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline()) != parent.pid, "a worker of an engine"
        assert daemon_on(tmp_path) == os.getpid()
        assert orphans(tmp_path) == []
        assert end_orphans(tmp_path) == []
        assert parent.poll() is None
        monkeypatch.delenv(STATE_ENV, raising=False)
        with pytest.raises(
            UserError, match=rf"state_dir: .*a running daemon \(pid {os.getpid()}\)"
        ):
            _begin_alone(tmp_path)
        assert STATE_ENV not in os.environ
        parent.communicate(timeout=60)


def test_an_engine_process_of_another_state_folder_is_left_alone(
    tmp_path: Path, left: subprocess.Popen[bytes]
) -> None:
    assert orphans(tmp_path / "other") == []
    assert end_orphans(tmp_path / "other") == []
    assert left.poll() is None
