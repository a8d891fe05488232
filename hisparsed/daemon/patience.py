"""How long a node may take to start and to stop, by how much host memory it pins.

The one place for these figures: the service manager is asked for this much time, and vLLM's
workers get the same before they are killed.
"""

from __future__ import annotations

_GIB = 2**30
_START_S = 3600.0
"""Weights may come over a network."""
_PIN_S_PER_GIB = 1.2
"""A pin of about 700 GB was seen to take twelve minutes (NVIDIA/TensorRT-LLM issue 17429)."""
_STOP_S = 20.0
_UNPIN_S_PER_GIB = 0.5
"""Well above what unpinning takes; being killed in the middle of it saves no time."""


def start_limit_s(host_budget_bytes: int) -> float:
    """Seconds after which a start is taken for hung."""
    return _START_S + _PIN_S_PER_GIB * host_budget_bytes / _GIB


def engine_stop_s(host_budget_bytes: int) -> float:
    """Seconds that the engine gets to stop before it is killed."""
    return _STOP_S + _UNPIN_S_PER_GIB * host_budget_bytes / _GIB
