"""Which backend serves a device: by name, or ``auto`` for the fastest that is there.

The choice is made once a process and logged with its reason; nothing is computed here.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Literal

import torch

Backend = Literal["auto", "torch", "cpp"]

_log = logging.getLogger(__name__)


def pick(backend: Backend, device: torch.device) -> Literal["torch", "cpp"]:
    """The backend to run on ``device``.

    Raises ``ValueError`` for a name or a device that does not fit, ``RuntimeError`` for the C++
    backend where it was not built.
    """
    if backend == "torch":
        return "torch"
    if backend == "auto":
        return "cpp" if device.type == "cpu" and not _why_no_cpp() else "torch"
    if backend != "cpp":
        raise ValueError(f"backend must be auto, torch or cpp, got {backend!r}")
    if device.type != "cpu":
        raise ValueError(f"backend cpp works on CPU tensors, the state is on {device}")
    if reason := _why_no_cpp():
        raise RuntimeError(f"backend cpp is not available: {reason}")
    return "cpp"


@cache
def _why_no_cpp() -> str:
    from hisparsed.kernels import cpp_library

    try:
        cpp_library.load()
    except OSError as error:
        _log.warning("kernels: auto uses the slower torch backend on the CPU: %s", error)
        return str(error)
    return ""
