"""vLLM's own OpenAI-compatible application around our engine, without vLLM's server loop.

The one place that knows how vLLM assembles its API; the daemon serves the result.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import copy
from importlib import import_module
from typing import Any, Final

_OFF: Final = {"VLLM_SERVER_DEV_MODE": "0", "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": "false"}
"""vLLM's switches for developers: calls that no client may make, and a log of every answer, which
also holds streams back until they have ended."""


def preload() -> None:
    """Import what ``build_openai_app`` needs: takes seconds, so not on an event loop."""
    import_module("vllm.entrypoints.launchers.api_server.app_state")
    import_module("vllm.entrypoints.launchers.app")


async def build_openai_app(llm: Any, arguments: Any, *, served_names: Sequence[str]) -> Any:
    """The FastAPI application with its state. ``llm`` is an ``AsyncLLM``.

    ``arguments`` are ``frontend_arguments``'. It asks for no key; the daemon's guard does.
    Clients may ask for any of ``served_names``; answers and metrics have the first.
    """
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    os.environ.update(_OFF)
    args = copy(arguments)
    args.model = llm.model_config.model
    args.served_model_name = list(served_names)
    # The engine's, so that engine and application read reasoning with the same parser.
    args.structured_outputs_config = llm.vllm_config.structured_outputs_config
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    return app
