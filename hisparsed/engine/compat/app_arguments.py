"""The arguments of vLLM's OpenAI application: in another module since 0.33."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

_NEW = "vllm.entrypoints.common.cli_args"
_OLD = "vllm.entrypoints.launchers.cli_args"


def make_arg_parser(parser: Any) -> Any:
    """``parser`` with the application's options. Imports for seconds the first time."""
    return load_arguments().make_arg_parser(parser)


def load_arguments() -> Any:
    """The module that has them."""
    return import_module(_OLD if find_spec(_OLD) is not None else _NEW)
