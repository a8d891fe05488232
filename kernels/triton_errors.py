"""Errors of the Triton kernels: one latch per device, and its figures in words.

A kernel cannot raise, and asking it after every step would stop the stream, so on a GPU the first
error waits here until it is read.
"""

from __future__ import annotations

import torch

from hisparsed.kernels import refusals
from hisparsed.kernels import triton_language as language

_latches: dict[tuple[str, int | None], torch.Tensor] = {}


def device_key(device: torch.device) -> tuple[str, int | None]:
    """One key per device: ``cuda`` without an index is the current one, as everywhere in torch."""
    index = torch.cuda.current_device() if device == torch.device("cuda") else device.index
    return device.type, index


def latch(device: torch.device) -> torch.Tensor:
    """int64 [6] on ``device``: code, 0 for none, and five figures."""
    key = device_key(device)
    found = _latches.get(key)
    if found is None:
        found = _latches[key] = torch.zeros(6, dtype=torch.int64, device=device)
    return found


def raise_latched(device: torch.device) -> None:
    """Raise and clear the first error since the last call; waits for the device."""
    held = latch(device)
    error = error_from(held.tolist())
    if error is not None:
        held.zero_()
        raise error


def error_from(words: list[int]) -> Exception | None:
    """The error in a copy of a latch's words; ``None`` when it is empty."""
    code, *figures = words
    return _error(code, *figures) if code else None


def _error(code: int, first: int, second: int, third: int, fourth: int, fifth: int) -> Exception:
    match code:
        case language.REQUEST_OUTSIDE.value:
            return refusals.request_outside(first, second)
        case language.STATE_OUTSIDE.value:
            return refusals.state_outside(first, second, third)
        case language.STATE_TWICE.value:
            return refusals.state_twice(first, second)
        case language.HOT_BLOCKS_MISSING.value:
            return refusals.hot_blocks_missing(first, second, third, fourth, fifth)
        case language.CAPACITY_OUTSIDE.value:
            return refusals.capacity_outside(first, second, third)
        case language.SWAP_COUNT_OUTSIDE.value:
            return refusals.swap_count_outside(first, second, third)
    return refusals.swap_row_outside(first, second, third, fourth)
