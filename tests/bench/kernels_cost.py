"""``python -m tests.bench.kernels_cost [--json]``: what a step costs a GPU, counted without one.

Launches, words and bytes follow from shapes and from what a step selects; registers, spills and
shared memory are the compiler's. Nothing is timed. GLM-5.x: 22 index groups, top-k 2048, 64
requests. ``BEFORE`` is the layout with a map of positions that this one replaced.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass

from hisparsed.kernels.api import state_bytes

GROUPS, REQUESTS, TOPK, LAYERS = 22, 64, 2048, 78
GHOST_EVERY = 64
CONTEXTS = (131_072, 1_048_576)
MULTIPLES = (2, 5)
_INT32, _INT64 = 4, 8


@dataclass(frozen=True)
class Case:
    """``used``: highest position that a request selects; ``q``: rows per request."""

    longest: int
    used: int
    capacity: int
    q: int = 1


@dataclass(frozen=True)
class Cost:
    """Of one index group and request but for what says otherwise; bytes of device memory."""

    state_mb: float
    """All groups and requests, with the workspace."""
    launches_group: int
    launches_step: int
    """Of all groups; gathers are in addition, one per layer."""
    words_scanned: int
    """Words of the bitmap that the plan looks through."""
    bytes_read: int
    bytes_written: int
    sampled_share: float
    """Steps in which some request of a group is sampled; 64 requests of independent age."""


def now(case: Case) -> Cost:
    bank, workspace = state_bytes(
        GROUPS, REQUESTS, case.capacity, case.longest, rows=REQUESTS * case.q, topk=TOPK
    )
    words = -(-case.used // 32)
    cells, union = TOPK * case.q, TOPK * case.q
    ghosts = -(-case.capacity // GHOST_EVERY)
    read = (
        cells * (2 * _INT32 + 2 * _INT32)  # top-k twice, resident and source block
        + words * _INT32
        + cells * (_INT64 + 3 * _INT32)  # listing the union: mark, position, word, count
        + case.capacity * 4 * _INT32  # hits: position, stamp, word, count
        + 2 * union * _INT32
        + 2 * ghosts * _INT32
        + _cut_off_bytes(case)
        + case.capacity * 2 * _INT32  # filling
        + cells * (_INT64 + 5 * _INT32)  # answering: mark, position, word, count, place, block
    )
    written = (
        (words + min(words, union)) * _INT32
        + cells * (_INT64 + _INT32)  # mark, bit
        + 3 * union * _INT32
        + 2 * ghosts * _INT32
        + case.capacity * _INT32  # stamps
        + cells * (2 * _INT64 + 1)  # physical row, attention index, miss
    )
    return Cost((bank + workspace) / 1e6, 2, 2 * GROUPS, words, read, written, 1 / 16)


def before(case: Case) -> Cost:
    words = -(-case.longest // 32)
    ghosts = -(-case.longest // GHOST_EVERY)
    bank = 8 * case.capacity + 2 * case.longest + 4 * ghosts + 264
    workspace = 5 * case.capacity + 12 * words + 4 * ghosts + 28
    cells = TOPK * case.q
    read = (
        cells * (_INT32 + 2 * _INT32 + 2)  # position, two blocks, slot by position
        + words * _INT32
        + 3 * case.capacity * 9  # hits, range of stamps, filling: position, stamp, flag
        + _cut_off_bytes(case) * 9 // 8
        + cells * (_INT64 + _INT32)  # listing the misses
        + cells * (_INT64 + 2 * _INT32 + 2)
    )
    written = cells * (_INT64 + 1) + case.capacity * _INT32 + cells * (2 * _INT64 + 1)
    total = GROUPS * ((REQUESTS + 1) * bank + REQUESTS * workspace)
    share = 1 - (15 / 16) ** REQUESTS
    return Cost(total / 1e6, 5, 5 * GROUPS, words, read, written, share)


def _cut_off_bytes(case: Case) -> int:
    """Position and stamp of every slot for one digit of the stamp and those of the position."""
    digits = 1 + -(-(case.used - 1).bit_length() // 8)
    return digits * case.capacity * 2 * _INT32


def cases() -> list[Case]:
    return [
        Case(longest, used, TOPK * multiple, q)
        for longest in CONTEXTS
        for used in CONTEXTS
        if used <= longest
        for multiple in MULTIPLES
        for q in ((1,) if multiple == 2 else (4,))
    ]


def measure() -> list[dict[str, object]]:
    return [
        {"case": asdict(case), "before": asdict(before(case)), "now": asdict(now(case))}
        for case in cases()
    ]


def table() -> str:
    lines = [
        f"{'longest':>9} {'used':>9} {'slots':>6} q {'':6} {'state MB':>8} {'launches':>8} "
        f"{'words':>6} {'read':>8} {'written':>8} sampled"
    ]
    for case in cases():
        for name, cost in (("before", before(case)), ("now", now(case))):
            lines.append(
                f"{case.longest:9} {case.used:9} {case.capacity:6} {case.q} {name:6} "
                f"{cost.state_mb:8.0f} {cost.launches_step:8} {cost.words_scanned:6} "
                f"{cost.bytes_read:8} {cost.bytes_written:8} {cost.sampled_share:7.1%}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.kernels_cost")
    parser.add_argument("--json", action="store_true", help="one JSON list")
    arguments = parser.parse_args()
    sys.stdout.write((json.dumps(measure()) if arguments.json else table()) + "\n")


if __name__ == "__main__":
    main()
