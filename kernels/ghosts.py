"""Which positions are ghost samples: exactly one in every group of ``ghost_every``.

The sample sits at a hashed place of its group, so that strides in what the indexer selects
do not meet or miss every sample alike. The C++ backend has the same few lines.
"""

from __future__ import annotations

import torch

_MULTIPLIER = 0x9E3779B1
_MASK = 0xFFFFFFFF


def are_ghosts(positions: torch.Tensor, every: int) -> torch.Tensor:
    """Which positions (int64, none below 0) are samples; ``every`` is a power of two."""
    hashed = (positions // every * _MULTIPLIER & _MASK) >> 16
    return ((hashed ^ positions) & (every - 1)) == 0
