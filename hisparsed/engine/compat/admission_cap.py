"""The resident pages that admission reserves for a call: a public name since vLLM 0.31."""

from __future__ import annotations

from typing import Any


def admission_cap(manager: Any) -> int:
    """Blocks a request at most, of a resident ``manager`` of vLLM."""
    if hasattr(manager, "max_admission_blocks_per_request"):
        return int(manager.max_admission_blocks_per_request)
    return int(manager._max_admission_blocks_per_request)
