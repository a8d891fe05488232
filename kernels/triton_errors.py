"""What the Triton kernels found wrong: one latch a device, and its figures in words.

A kernel cannot raise, and asking it after every step would stop the stream, so on a GPU the
first error waits here until somebody asks.
"""

from __future__ import annotations

import torch

from hisparsed.kernels import triton_language as language

_latches: dict[torch.device, torch.Tensor] = {}


def latch(device: torch.device) -> torch.Tensor:
    """int64 [6] on ``device``: code, 0 for none, and five figures."""
    found = _latches.get(device)
    if found is None:
        found = _latches[device] = torch.zeros(6, dtype=torch.int64, device=device)
    return found


def raise_latched(device: torch.device) -> None:
    """Raise and clear the first error since the last call; waits for the device."""
    held = latch(device)
    error = error_from(held.tolist())
    if error is not None:
        held.zero_()
        raise error


def error_from(words: list[int]) -> Exception | None:
    """What a copy of a latch's words says; ``None`` when it is empty."""
    code, *figures = words
    return _error(code, *figures) if code else None


def _error(code: int, first: int, second: int, third: int, fourth: int, fifth: int) -> Exception:
    match code:
        case language.REQUEST_OUTSIDE.value:
            return ValueError(f"row {first}: request id {second} is not in state_of_request")
        case language.STATE_OUTSIDE.value:
            return ValueError(
                f"request {first}: state row {second} does not exist, rows are 0 to {third - 1}"
            )
        case language.STATE_TWICE.value:
            return ValueError(
                "rows of one request must be consecutive and no two requests may share a state "
                f"row; state row {first} appears twice, once for request {second}"
            )
        case language.HOT_BLOCKS_MISSING.value:
            return ValueError(
                f"state row {first}: capacity {third} needs {fourth} hot blocks, "
                f"the hot table of request {second} names {fifth}; "
                "lease blocks before growing, shrink before returning them"
            )
    return IndexError(
        f"swap of host row {first} to physical row {second} reaches outside the memory"
    )
