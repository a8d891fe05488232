"""vLLM's operators for HiSparse and for copies, as the stand-in GPU has them, in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hot_worker import Stand, without_cuda
from vllm.v1.hisparse import runtime as vllm_runtime

SITE = Path(__file__).parents[2] / "standin" / "site"
HOT = (
    "hisparse_resolve_residency",
    "hisparse_gather_compact",
    "hisparse_invalidate_written_slots",
)


def compiled() -> Any:
    """The module, without leaving its folder on the path: vLLM would find a platform there."""
    sys.path.append(str(SITE))
    try:
        from standin_gpu import compiled
    finally:
        sys.path.remove(str(SITE))
    return compiled


def vllms_side_on_the_cpu(patch: pytest.MonkeyPatch) -> None:
    """Let vLLM's runtimes be made and run, with its operators in torch."""
    without_cuda(patch)
    patch.setattr(vllm_runtime, "_create_copy_stream", lambda device: Stand())
    for name in HOT:
        patch.setattr(torch.ops._C_cache_ops, name, getattr(compiled(), name), raising=False)
