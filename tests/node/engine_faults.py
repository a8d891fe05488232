"""Faults of a node's engine on demand: a vLLM plugin that a test adds to the daemon.

vLLM loads general plugins in the engine's process; this one makes the executor raise, the start
fail, or the process die, once the test has made the file for it. Not for the daemon's faults.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

FOLDER_ENV = "HISPARSED_TEST_FAULTS"
RAISE = "raise"
"""While a file of this name is there, the next step of the executor raises."""
COMPILE = "compile"
"""The next step runs what is behind this name in the folder, a symbolic link, for five seconds."""
NO_START = "no-start"
"""While a file of this name is there, no engine starts."""

NO_ANSWER = "no-answer"
"""The engine that is asked next, as the daemon does as soon as one is up, is killed, once."""

_DISTRIBUTION = {
    "METADATA": "Metadata-Version: 2.1\nName: node-faults\nVersion: 1\n",
    "entry_points.txt": "[vllm.general_plugins]\nnode-faults = engine_faults:register\n",
}


class Faults:
    """The faults of one node; ``environment`` goes to its daemon."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        info = folder / "node_faults-1.dist-info"
        info.mkdir(parents=True)
        for name, text in _DISTRIBUTION.items():
            (info / name).write_text(text, encoding="utf-8")

    @property
    def environment(self) -> dict[str, str]:
        here = Path(__file__)
        paths = (str(self._folder), str(here.parent), str(here.parents[2]))
        return {"PYTHONPATH": os.pathsep.join(paths), FOLDER_ENV: str(self._folder)}

    def compile_in_the_next_step(self) -> None:
        (self._folder / COMPILE).symlink_to(shutil.which("sleep") or "")

    def begin(self, fault: str) -> None:
        (self._folder / fault).touch()

    def end(self, fault: str) -> None:
        (self._folder / fault).unlink(missing_ok=True)


def register() -> None:
    """Entry point of the plugin."""
    import multiprocessing
    import subprocess

    folder = Path(os.environ[FOLDER_ENV])
    if multiprocessing.parent_process() is None:
        return  # the daemon loads plugins too
    if (folder / NO_START).exists():
        raise RuntimeError("a test wants no engine to start")
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCoreProc

    from hisparsed.engine.reference.executor import ReferenceExecutor

    handle = EngineCoreProc._handle_client_request

    def asked(self: EngineCoreProc, kind: EngineCoreRequestType, request: object) -> None:
        if kind is EngineCoreRequestType.UTILITY and (folder / NO_ANSWER).exists():
            (folder / NO_ANSWER).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        handle(self, kind, request)

    EngineCoreProc._handle_client_request = asked  # type: ignore[method-assign]
    execute = ReferenceExecutor.execute_model

    def faulty(self: ReferenceExecutor, *given: object, **named: object) -> object:
        if (folder / RAISE).exists():
            raise RuntimeError("a test wants the executor to fail")
        if (folder / COMPILE).exists():
            (folder / COMPILE).rename(folder / "ptxas")
            subprocess.run([str(folder / "ptxas"), "5"], check=True)
        return execute(self, *given, **named)  # type: ignore[arg-type]

    ReferenceExecutor.execute_model = faulty  # type: ignore[method-assign]
