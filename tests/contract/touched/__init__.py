"""The table of vLLM names: every module in this folder contributes its ``TOUCHED``."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from tests.contract.touch import Touch

PUBLIC = frozenset({"vllm:SamplingParams"})
"""What vLLM's documentation promises; imported as it says, and not listed one by one."""


def all_touched() -> tuple[Touch, ...]:
    """Every entry, by module of ours and in its order. Imports no vLLM."""
    return tuple(
        touch
        for found in sorted(iter_modules(__path__), key=lambda found: found.name)
        for touch in import_module(f"{__name__}.{found.name}").TOUCHED
    )
