"""The input of one resolve call: one decode step of one index group.

Passed whole from the public call to the backends. Holds no results and nothing between steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hisparsed.kernels.geometry import Geometry


@dataclass(frozen=True, eq=False)
class Step:
    """Tensors and their shapes are those of ``hisparsed.kernels.api.resolve``."""

    geometry: Geometry
    topk: torch.Tensor
    request_ids: torch.Tensor
    state_of_request: torch.Tensor
    source_table: torch.Tensor
    resident_table: torch.Tensor
    hot_table: torch.Tensor
    scratch_table: torch.Tensor | None
