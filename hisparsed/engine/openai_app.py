"""vLLM's OpenAI-compatible application around hisparsed's engine, without vLLM's server loop.

Its arguments are the operator's ``frontend_args`` and the daemon's own. They are checked before an
engine starts, because loading weights takes minutes; arguments that only the daemon may set were
refused with the document. The only module that knows how vLLM assembles its API; the daemon serves
the result. Imports vLLM only when called.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import fields
from importlib import import_module
from typing import Any, Final

from pydantic import ValidationError

from hisparsed.config.machine import NodeKind
from hisparsed.config.node import NodeConfig
from hisparsed.engine.compat.adapters import load_arguments, make_arg_parser, schemas_of_tools
from hisparsed.errors import UserError

KEY = "frontend_args"
_OURS: Mapping[str, Any] = {
    # They carry the prefix hits that operators and the replay look at.
    "enable_prompt_tokens_details": True,
    # Before 0.32 vLLM lets pages of any site call the node.
    "allowed_origins": [],
    "disable_uvicorn_access_log": True,
}
"""Unless the operator sets others."""
_REFERENCE: Mapping[str, Any] = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}
"""The same on the reference node. Its model has no format for tool calls, so this is plain text
around JSON. The arguments follow the tool's schema, strict or not, as a trained model's would."""


def frontend_arguments(config: NodeConfig, kind: NodeKind) -> Any:
    """vLLM's ``Namespace``, complete except for the engine's part: model and API keys.

    Imports parser plugins of the operator's. Raises ``UserError``.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    module = load_arguments()
    reference = {**_REFERENCE, **schemas_of_tools(module.FrontendArgs)}
    given = {**_OURS, **(reference if kind == "reference" else {}), **config.frontend_args}
    _require_known(module.FrontendArgs, config)
    try:
        frontend = module.FrontendArgs(**given)
    except ValidationError as error:
        raise UserError("\n".join(_sentence(one) for one in error.errors())) from error
    _require_parsers(frontend, config.engine_args)
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    for name in given:
        setattr(arguments, name, getattr(frontend, name))
    try:
        module.validate_parsed_serve_args(arguments)
    except (ValueError, TypeError, VLLMValidationError) as error:
        raise UserError(f"{KEY}: vLLM refuses them: {error}") from error
    return arguments


def _require_known(frontend_class: Any, config: NodeConfig) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {one.name for one in fields(frontend_class)}
    of_engine = {one.name for one in fields(AsyncEngineArgs)}
    for name in config.frontend_args:
        if name in of_engine:
            raise UserError(f"{KEY}.{name}: is an argument of the engine; write it in engine_args")
        if name not in known:
            raise UserError(
                f"{KEY}.{name}: this vLLM's OpenAI application has no such argument"
                f"{_close(name, known)}"
            )
    for name in config.engine_args:
        if name in known - of_engine:
            raise UserError(
                f"engine_args.{name}: is an argument of the OpenAI application; write it in {KEY}"
            )


def _require_parsers(frontend: Any, engine_args: Mapping[str, Any]) -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    if frontend.tool_parser_plugin:
        ToolParserManager.import_tool_parser(frontend.tool_parser_plugin)
    if plugin := engine_args.get("reasoning_parser_plugin"):
        ReasoningParserManager.import_reasoning_parser(plugin)
    _require_registered(
        f"{KEY}.tool_call_parser",
        frontend.tool_call_parser,
        ToolParserManager.list_registered(),
        frontend.tool_parser_plugin,
    )
    _require_registered(
        "engine_args.reasoning_parser",
        engine_args.get("reasoning_parser"),
        ReasoningParserManager.list_registered(),
        plugin,
    )
    if frontend.enable_auto_tool_choice and not frontend.tool_call_parser:
        raise UserError(
            f"{KEY}.enable_auto_tool_choice: needs a parser; set {KEY}.tool_call_parser to the "
            "model's, such as glm47 for GLM-5.x"
        )


def _require_registered(
    place: str, name: Any, registered: Collection[str], plugin: str | None
) -> None:
    if name and name not in registered:
        beside = f", and {plugin} registers none (the lines above say why)" if plugin else ""
        raise UserError(
            f"{place}: {name!r} is no parser of this vLLM{beside}{_close(str(name), registered)}; "
            f"it has {', '.join(sorted(registered))}"
        )


def _close(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _sentence(error: Any) -> str:
    place = ".".join(str(part) for part in (KEY, *error["loc"]))
    return f"{place}: {error['input']!r} cannot be: {error['msg']}"


_OFF: Final = {"VLLM_SERVER_DEV_MODE": "0", "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": "false"}
"""vLLM's switches for developers: calls that no client may make, and a log of every answer, which
also holds streams back until they have ended."""


def preload() -> None:
    """Import what ``build_openai_app`` needs: takes seconds, so not on an event loop."""
    import_module("vllm.entrypoints.launchers.api_server.app_state")
    import_module("vllm.entrypoints.launchers.app")


async def build_openai_app(llm: Any, arguments: Any, *, served_names: Sequence[str]) -> Any:
    """The FastAPI application with its state. ``llm`` is an ``AsyncLLM``.

    ``arguments`` are ``frontend_arguments``'. It does not check API keys; the daemon does. Clients
    may ask for any of ``served_names``; answers and metrics have the first.
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
