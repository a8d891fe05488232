"""The public face of the kernels: resolve top-k positions, move rows, read miss curves.

One dispatch by backend name over one struct-of-arrays state. Imports neither the daemon nor
vLLM; the folder is a namespace package, so this module is what others import.
"""

from __future__ import annotations

import torch

from hisparsed.kernels import torch_backend, torch_gather
from hisparsed.kernels.backends import Backend, pick
from hisparsed.kernels.bank_shrink import SlotMoves
from hisparsed.kernels.bank_shrink import shrink as shrink_rows
from hisparsed.kernels.checks import check_gather, check_memory, check_resolve, check_topk
from hisparsed.kernels.curve import (
    MissCurve,
    miss_ratio_curve,
    pooled_miss_curve,
    request_miss_curves,
)
from hisparsed.kernels.geometry import Geometry, RowLayout
from hisparsed.kernels.resolution import Resolution
from hisparsed.kernels.state import COUNTERS, MAX_CAPACITY, ResolverState
from hisparsed.kernels.state_bank import StateBank, state_bytes
from hisparsed.kernels.step import Step
from hisparsed.kernels.upkeep import invalidate, reset, set_capacity

__all__ = [
    "COUNTERS",
    "MAX_CAPACITY",
    "Backend",
    "Geometry",
    "MissCurve",
    "Resolution",
    "ResolverState",
    "RowLayout",
    "SlotMoves",
    "StateBank",
    "apply_moves",
    "error_from",
    "error_words",
    "gather",
    "invalidate",
    "miss_ratio_curve",
    "pooled_miss_curve",
    "raise_errors",
    "request_miss_curves",
    "reserve",
    "reset",
    "resolve",
    "set_capacity",
    "shrink_rows",
    "state_bytes",
]


def resolve(
    state: ResolverState,
    geometry: Geometry,
    topk: torch.Tensor,
    request_ids: torch.Tensor,
    state_of_request: torch.Tensor,
    source_table: torch.Tensor,
    resident_table: torch.Tensor,
    hot_table: torch.Tensor,
    scratch_table: torch.Tensor | None = None,
    *,
    out: Resolution | None = None,
    backend: Backend = "auto",
) -> Resolution:
    """Where attention reads every top-k position of one decode step of one index group.

    All inputs are int32 on the device of ``state``:

    - ``topk`` [R, K]: request-local positions, -1 padding; duplicates are legal;
    - ``request_ids`` [R]: request of a row, -1 padding; rows of a request are consecutive;
    - ``state_of_request`` [N]: state row of a request, -1 none; no two requests share one;
    - ``source_table`` [N, *], ``resident_table`` [N, *] ([S, *] with
      ``geometry.resident_by_state``), ``hot_table`` [N, *]: block ids, 0 or less is null;
      rows may be strided;
    - ``scratch_table`` [*]: blocks shared by all requests of the step for rows that do not fit
      their capacity; the first null ends it.

    A position is read from its resident page, else from its hot slot, where a row that is not
    held is first loaded from the host (``gather`` the returned swap lists before attention);
    without a host row it is nowhere (-1). Call ``state.begin_step`` once before the calls of a
    step: it says which steps are sampled. Writes ``out`` in place (its first R rows) and returns
    that part; without ``out`` it allocates. Raises ``ValueError`` on shapes, dtypes and, before
    it writes any state of the request concerned, on a capacity that the hot table does not cover
    or that is above ``max_capacity``; ``RuntimeError`` on a step that would move memory that a
    captured graph holds (see ``reserve``). On a GPU the Triton backend cannot raise on values:
    see ``raise_errors``.
    """
    check_topk(topk, state.device)
    rows, width = topk.shape
    if out is None:
        out = Resolution.create(rows, width, device=topk.device)
    out = out.first(rows)
    step = Step(
        geometry,
        topk,
        request_ids,
        state_of_request,
        source_table,
        resident_table,
        hot_table,
        scratch_table,
    )
    check_resolve(state, step, out)
    if topk.numel() == 0:
        out.valid_counts.zero_()
        out.swap_counts.zero_()
        return out
    run = torch_backend.resolve
    match pick(backend, state.device):
        case "cpp":
            from hisparsed.kernels import cpp_backend

            run = cpp_backend.resolve
        case "triton":
            from hisparsed.kernels import triton_backend

            run = triton_backend.resolve
    run(state, step, out)
    return out


def gather(
    host: torch.Tensor,
    slab: torch.Tensor,
    layout: RowLayout,
    swap_host: torch.Tensor,
    swap_physical: torch.Tensor,
    swap_counts: torch.Tensor,
    *,
    pinned: bool = False,
    backend: Backend = "auto",
) -> None:
    """Copy the listed host rows to their physical rows on every layer of ``layout``.

    ``host`` and ``slab`` are uint8 1-D and contiguous; ``swap_host`` and ``swap_physical``
    int64 [R, K] and ``swap_counts`` int32 [R] as in ``Resolution``. One list serves all layers
    of the group. Raises ``ValueError`` on shapes, dtypes and counts that are not 0 to K,
    ``IndexError`` on rows outside, before anything is copied. On a GPU the host memory must be
    pinned, what is outside is skipped, and errors on values wait for ``raise_errors``.
    ``pinned`` says that the caller knows it is: torch does not see what others have registered.
    """
    check_gather(host, slab, swap_host, swap_physical, swap_counts)
    swaps = (swap_host, swap_physical, swap_counts)
    match pick(backend, slab.device):
        case "cpp":
            from hisparsed.kernels import cpp_backend

            cpp_backend.gather(host, slab, layout, *swaps)
        case "triton":
            from hisparsed.kernels import triton_backend

            triton_backend.gather(host, slab, layout, *swaps, pinned=pinned)
        case _:
            torch_gather.gather(host, slab, layout, *swaps)


def reserve(state: ResolverState, rows: int, topk: int) -> None:
    """Make all memory that steps of at most ``rows`` rows need next to ``state``, once.

    Call it before graphs are captured: afterwards nothing grows, and a larger step is refused.
    All states of a device share that memory, so it is enough to reserve for each of the largest.
    Only the Triton backend needs it; elsewhere it does nothing.
    """
    if rows < 1 or topk < 1:
        raise ValueError(f"rows and topk must be at least 1, got {rows} and {topk}")
    if pick("auto", state.device) == "triton":
        from hisparsed.kernels.triton_errors import latch
        from hisparsed.kernels.triton_workspace import workspace

        latch(state.device)
        workspace(state, rows, topk)


def raise_errors(device: torch.device) -> None:
    """Raise what ``resolve`` and ``gather`` met on ``device`` since the last call, once.

    Only the Triton backend keeps errors: raising at once would make every step wait for the GPU.
    Its kernels stay inside their tables anyway: refused entries become -1 or are not copied. Waits
    for the device. Raises as ``resolve`` and ``gather`` do.
    """
    if device.type == "cuda" and pick("auto", device) == "triton":
        from hisparsed.kernels.triton_errors import raise_latched

        raise_latched(device)


def error_words(device: torch.device) -> torch.Tensor:
    """Where errors on ``device`` are kept, int64 [6], to be copied without waiting.

    Read a copy with ``error_from``. On the CPU, where backends raise, it stays empty.
    """
    if device.type == "cuda" and pick("auto", device) == "triton":
        from hisparsed.kernels.triton_errors import latch

        return latch(device)
    return torch.zeros(6, dtype=torch.int64, device=device)


def error_from(words: list[int]) -> Exception | None:
    """The error that a copy of ``error_words`` holds; ``None`` when it holds none."""
    if not words[0]:
        return None
    from hisparsed.kernels import triton_errors

    return triton_errors.error_from(words)


def apply_moves(
    slab: torch.Tensor, layout: RowLayout, hot_blocks: torch.Tensor, moves: torch.Tensor
) -> None:
    """Carry out the slot moves of ``set_capacity`` on every layer of ``layout``.

    ``hot_blocks`` is the request's row of the hot table (int32 [n]), still with the blocks that
    go back afterwards; ``moves`` int32 [M, 2]. Raises ``IndexError`` when it names too few.
    """
    check_memory("slab", slab)
    if moves.shape[0] == 0:
        return
    size = layout.block_size
    slots = moves.long()
    if int(slots.min()) < 0:
        raise IndexError(f"moves name slot {int(slots.min())}; slots are 0 and more")
    needed = int(slots.max()) // size + 1
    if hot_blocks.shape[0] < needed or bool((hot_blocks[:needed] <= 0).any()):
        raise IndexError(
            f"moves reach slot {int(slots.max())}, which needs {needed} leased hot blocks; "
            f"the table has {int((hot_blocks > 0).sum())}: return blocks only after the moves"
        )
    rows = hot_blocks[slots // size].long() * size + slots % size
    torch_gather.copy_rows(slab, layout, rows[:, 0], rows[:, 1])
