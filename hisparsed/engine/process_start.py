"""How vLLM starts an engine's processes: spawned, each with our plugin.

vLLM takes both from the environment. It forks on CUDA by default; a forked engine core shares the
daemon's signal wake-up and sockets, and its plugins count as loaded. Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from hisparsed.engine.plugin import LAUNCHED_ENV
from hisparsed.errors import UserError

METHOD_ENV = "VLLM_WORKER_MULTIPROC_METHOD"
METHOD = "spawn"


def start_method_problem(environ: Mapping[str, str]) -> str | None:
    """Why ``environ`` starts no engine; ``None`` where it does."""
    found = environ.get(METHOD_ENV)
    if found in (None, METHOD):
        return None
    return (
        f"{METHOD_ENV}: {found!r} starts no engine of hisparsed, whose processes must share "
        f"neither signals nor sockets with the daemon; unset it, or set it to {METHOD}"
    )


def set_process_start(environ: MutableMapping[str, str]) -> None:
    """Call before vLLM is imported, with the environment of this process.

    Raises ``UserError`` where the operator asks for another start method.
    """
    problem = start_method_problem(environ)
    if problem is not None:
        raise UserError(problem)
    environ[METHOD_ENV] = METHOD
    environ[LAUNCHED_ENV] = "1"
