"""`hisparsed` on a platform that leaves the start method of processes alone, as CUDA's does.

vLLM's CPU platform forces spawn, and so hides what CUDA would do. Also ends a daemon, or an engine
process, that imports vLLM before the environment says how vLLM starts processes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

METHOD_ENV = "VLLM_WORKER_MULTIPROC_METHOD"
EXIT_TOO_EARLY = 99
_PLATFORM = "vllm.platforms.cpu"


class _Watch(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in ("vllm", _PLATFORM):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if os.environ.get("HISPARSED_ENGINE") != "1":
                os.write(2, b"vLLM is imported before its environment is set\n")
                os._exit(EXIT_TOO_EARLY)
            execute(module)
            if name == _PLATFORM:
                _leave_method_alone(module.CpuPlatform)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _leave_method_alone(platform: Any) -> None:
    update = platform.check_and_update_config

    def check_and_update_config(config: Any) -> None:
        before = os.environ.get(METHOD_ENV)
        update(config)
        os.environ.pop(METHOD_ENV)
        if before is not None:
            os.environ[METHOD_ENV] = before

    platform.check_and_update_config = staticmethod(check_and_update_config)


# Also in spawned processes, which import this file again.
sys.meta_path.insert(0, _Watch())

if __name__ == "__main__":
    from hisparsed.cli.app import main

    sys.exit(main())
