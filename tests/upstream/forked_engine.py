"""A program that embeds ``AsyncLLM`` on CUDA forks its engine core, which shares its signals.

``vllm serve`` sets ``VLLM_WORKER_MULTIPROC_METHOD=spawn`` in its own process, and so do the CPU and
XPU platforms; a program that embeds vLLM on CUDA gets the default, fork. The child then writes
every signal that it receives into the parent's asyncio wake-up socket, so a SIGTERM for the engine
core stops the program. ``load_general_plugins`` has loaded them in the parent and does nothing in
the child. A process that vLLM's own ``get_mp_context`` starts plays the engine core here.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from typing import Any

from tests.upstream.outcome import run

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def load_marked_plugin(loaded: Any) -> None:
    """vLLM's loading of general plugins, with one plugin that counts how often it was called."""
    from vllm import plugins

    def mark() -> None:
        loaded.value += 1

    plugins.load_plugins_by_group = lambda group: {"marked": mark}
    plugins.load_general_plugins()


def engine_core(loaded: Any, ready: Any) -> None:
    """Takes SIGTERM as vLLM's engine core does: with its own handler."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    load_marked_plugin(loaded)
    ready.set()
    while True:
        signal.pause()


async def embed() -> str | None:
    from vllm.utils.system_utils import get_mp_context

    context = get_mp_context()
    loaded, ready = context.Value("i", 0), context.Event()
    load_marked_plugin(loaded)
    assert loaded.value == 1
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    child = context.Process(target=engine_core, args=(loaded, ready))
    child.start()
    await asyncio.to_thread(ready.wait, 60)
    os.kill(child.pid, signal.SIGTERM)
    await asyncio.to_thread(child.join, 60)
    with suppress(TimeoutError):
        await asyncio.wait_for(stopped.wait(), 0.5)
    loop.remove_signal_handler(signal.SIGTERM)
    found = []
    if stopped.is_set():
        found.append("SIGTERM to the child alone ran the SIGTERM handler of its parent")
    if loaded.value == 1:
        found.append("the child's load_general_plugins loaded no plugin")
    return f"With {context.get_start_method()}: {'; '.join(found)}." if found else None


def reproduce() -> str | None:
    before = os.environ.pop(METHOD, None)
    try:
        return asyncio.run(embed())
    finally:
        if before is not None:
            os.environ[METHOD] = before


if __name__ == "__main__":
    run(reproduce)
