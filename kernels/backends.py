"""Chooses the backend for a device: by name, or ``auto`` for the fastest one available.

The choice is made once per process and logged with its reason; nothing is computed here.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Literal

import torch

Name = Literal["torch", "cpp", "triton"]
Backend = Literal["auto"] | Name

_log = logging.getLogger(__name__)


def pick(backend: Backend, device: torch.device) -> Name:
    """The backend to run on ``device``.

    Raises ``ValueError`` for a name or a device that does not fit, ``RuntimeError`` for a backend
    that is not available: C++ that was not built, Triton that is not installed.
    """
    if backend == "torch":
        return "torch"
    if backend == "auto":
        return _fastest(device.type)
    if backend == "triton":
        return _triton_on(device)
    if backend != "cpp":
        raise ValueError(f"backend must be auto, torch, cpp or triton, got {backend!r}")
    if device.type != "cpu":
        raise ValueError(f"backend cpp works on CPU tensors, the state is on {device}")
    if reason := _why_no_cpp():
        raise RuntimeError(f"backend cpp is not available: {reason}")
    return "cpp"


def _fastest(device_type: str) -> Name:
    if device_type == "cuda" and not _why_no_triton():
        return "triton"
    if device_type == "cpu" and not _why_no_cpp():
        return "cpp"
    return "torch"


def _triton_on(device: torch.device) -> Name:
    if reason := _why_no_triton():
        raise RuntimeError(f"backend triton is not available: {reason}")
    from hisparsed.kernels import triton_backend

    if device.type not in (("cpu",) if triton_backend.INTERPRETED else ("cuda",)):
        raise ValueError(
            f"backend triton works on CUDA tensors, the state is on {device}; on CPU tensors it "
            "works only where TRITON_INTERPRET=1 was set before Triton was imported"
        )
    return "triton"


@cache
def _why_no_triton() -> str:
    try:
        from hisparsed.kernels import triton_backend  # noqa: F401
    except ImportError as error:
        _log.warning("kernels: auto uses the slower torch backend on the GPU: %s", error)
        return str(error)
    return ""


@cache
def _why_no_cpp() -> str:
    from hisparsed.kernels import cpp_library

    try:
        cpp_library.load()
    except OSError as error:
        _log.warning("kernels: auto uses the slower torch backend on the CPU: %s", error)
        return str(error)
    return ""
