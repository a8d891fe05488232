"""Stand-ins with which vLLM's HiSparse runtimes are made and run on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.hisparse import runtime as vllm_runtime

from hisparsed.engine.cuda.residency import extension


class Stand:
    """A stream or event that is always done."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def record(self, _: Any = None) -> None: ...


class UnpinnedTorch:
    """torch, but host memory is not pinned and events are stand-ins."""

    Event = Stand

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, **options: Any) -> torch.Tensor:
        options.pop("pin_memory", None)
        return torch.empty(*size, **options)


def two_hot_groups(patch: pytest.MonkeyPatch) -> None:
    """The miniature has no cache configuration of vLLM's; its hot groups are all there are."""
    patch.setattr(extension, "hot_cache_groups", lambda _: [0, 1])


def without_cuda(patch: pytest.MonkeyPatch) -> None:
    """Let vLLM's runtimes be made and run on the CPU."""
    patch.setattr(vllm_runtime, "torch", UnpinnedTorch())
    patch.setattr(vllm_runtime, "_has_hisparse_ops", lambda: True)
    patch.setattr(vllm_runtime, "current_stream", Stand)
    patch.setattr(vllm_runtime, "in_piecewise_cudagraph", lambda: False)
