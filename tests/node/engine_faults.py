"""Faults of a node's engine on demand: a vLLM plugin that a test puts beside the daemon.

vLLM loads general plugins in the engine's process; this one makes the executor raise, or the
start fail, once the test has made a file that says so. Not for the daemon's own faults.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

FOLDER_ENV = "HISPARSED_TEST_FAULTS"
RAISE = "raise"
"""While a file of this name is there, the next step of the executor raises."""
COMPILE = "compile"
"""The next step runs what is behind this name in the folder, a symbolic link, for five seconds."""
NO_START = "no-start"
"""While a file of this name is there, no engine starts."""

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
    from hisparsed.engine.reference.executor import ReferenceExecutor

    execute = ReferenceExecutor.execute_model

    def faulty(self: ReferenceExecutor, *given: object, **named: object) -> object:
        if (folder / RAISE).exists():
            raise RuntimeError("a test wants the executor to fail")
        if (folder / COMPILE).exists():
            (folder / COMPILE).rename(folder / "ptxas")
            subprocess.run([str(folder / "ptxas"), "5"], check=True)
        return execute(self, *given, **named)  # type: ignore[arg-type]

    ReferenceExecutor.execute_model = faulty  # type: ignore[method-assign]
