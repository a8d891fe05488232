"""vLLM's own OpenAI-compatible application around our engine, without vLLM's server loop.

The one place that knows how vLLM assembles its API; the daemon serves the result.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, Final

from hisparsed.engine.compat.app_arguments import load_arguments, make_arg_parser

_OFF: Final = {"VLLM_SERVER_DEV_MODE": "0", "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": "false"}
"""vLLM's switches for developers: calls that no client may make, and a log of every answer, which
also holds streams back until they have ended."""


def preload() -> None:
    """Import what ``build_openai_app`` needs: takes seconds, so not on an event loop."""
    import_module("vllm.entrypoints.launchers.api_server.app_state")
    import_module("vllm.entrypoints.launchers.app")
    load_arguments()


async def build_openai_app(llm: Any, *, api_keys: list[str]) -> Any:
    """The FastAPI application with its state. ``llm`` is an ``AsyncLLM``.

    ``api_keys`` are required of clients when not empty. Prompt token details are on: they
    carry the prefix hits that operators and the replay look at.
    """
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    os.environ.update(_OFF)
    model_config = llm.model_config
    arguments = [
        "--model",
        model_config.model,
        "--served-model-name",
        _served_name(model_config),
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
    ]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    args.api_key = api_keys or None
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, model_config)
    await init_app_state(llm, app.state, args, tasks)
    return app


def _served_name(model_config: Any) -> str:
    name = model_config.served_model_name
    return str(name[0] if isinstance(name, list) else name)
