"""``python -m tests.bench.kernels [--json] [--quick]``: what the kernels cost, side by side.

Measures resolve on every backend, the sampling overhead, capacity changes, and the row gather
against memcpy. docs/kernels.md says what bounds each figure.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from typing import Any

import numpy as np
import torch

from hisparsed.kernels.api import Backend, RowLayout, gather, reset, set_capacity
from tests.bench import kernels_gpu
from tests.bench.kernels_work import (
    BLOCK,
    Case,
    Inputs,
    Seconds,
    best_of,
    make_inputs,
    miss_ratio,
    run_steps,
    timed,
)

ROW_BYTES = 656
LAYERS = 4
REFERENCE = Case(k=2048, capacity=8192, q=1, requests=1)
CASES = (
    Case(k=2048, capacity=2048, q=1, requests=1),
    Case(k=2048, capacity=4096, q=1, requests=1),
    REFERENCE,
    Case(k=2048, capacity=32704, q=1, requests=1),
    Case(k=2048, capacity=10240, q=4, requests=1),
    Case(k=2048, capacity=8192, q=1, requests=8),
    Case(k=64, capacity=320, q=1, requests=8),
)
BACKENDS: tuple[Backend, ...] = ("torch", "cpp")
_NEVER = 2**30
"""A sample period that no step reaches."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.kernels")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--quick", action="store_true", help="fewer steps and repetitions")
    arguments = parser.parse_args()
    figures = measure(steps=32 if arguments.quick else 96, repeats=3 if arguments.quick else 7)
    text = json.dumps(figures) if arguments.json else table(figures)
    sys.stdout.write(text + "\n")


def measure(steps: int, repeats: int) -> dict[str, Any]:
    """All figures; ``steps`` is a multiple of 16, the period of the sampling."""
    rows: list[dict[str, Any]] = []
    for case in CASES:
        inputs = make_inputs(case, steps, seed=1)
        rows += [_resolve_row(case, inputs, backend, repeats) for backend in BACKENDS]
    reference = {row["backend"]: row for row in rows if _is_reference(row)}
    torch_us, cpp_us = (reference[name]["us_per_request"] for name in ("torch", "cpp"))
    return {
        "rows": rows,
        "cpp_over_torch": torch_us / cpp_us,
        "octile_overhead": _octile_overhead(steps, repeats),
        **_gather_figures(repeats),
        **_capacity_figures(repeats),
        "gpu": kernels_gpu.measure(steps, repeats) if torch.cuda.is_available() else [],
        "machine": {"threads": torch.get_num_threads(), "torch": torch.__version__},
    }


def _is_reference(row: dict[str, Any]) -> bool:
    return all(row[name] == getattr(REFERENCE, name) for name in ("k", "capacity", "q", "requests"))


def _row(case: Case, backend: str, seconds: float, ratio: float) -> dict[str, Any]:
    return {
        "backend": backend,
        "k": case.k,
        "capacity": case.capacity,
        "q": case.q,
        "requests": case.requests,
        "us_per_request": seconds / case.requests * 1e6,
        "miss_ratio": ratio,
    }


def _warm(seconds: Seconds) -> float:
    """Mean of the second half of the steps: the cold fill is not what a node lives on."""
    return float(seconds[len(seconds) // 2 :].mean())


def _resolve_row(case: Case, inputs: Inputs, backend: Backend, repeats: int) -> dict[str, Any]:
    runs = [run_steps(case, inputs, backend, sample_period=16) for _ in range(repeats)]
    return _row(
        case, backend, _warm(np.min([run[0] for run in runs], axis=0)), miss_ratio(runs[0][1])
    )


def _octile_overhead(steps: int, repeats: int) -> float:
    """Mean extra time of a step with octiles and ghosts every 16th step, as a fraction."""
    inputs = make_inputs(REFERENCE, steps, seed=2)
    runs: dict[int, list[Seconds]] = {_NEVER: [], 16: []}
    # Turn and turn about, so that a slow second of the machine hits both.
    for _ in range(2 * repeats):
        for period, seconds in runs.items():
            seconds.append(run_steps(REFERENCE, inputs, "cpp", sample_period=period)[0])
    warm = -16 * (steps // 32)
    mean = {period: np.min(seconds, axis=0)[warm:].mean() for period, seconds in runs.items()}
    return float(mean[16] / mean[_NEVER] - 1)


def _gather_figures(repeats: int) -> dict[str, float]:
    """2,048 rows of 656 B on four layers, against numpy's row copy by index of the same rows."""
    rows, host_rows = 2048, 1 << 16
    rng = np.random.default_rng(3)
    page = BLOCK * ROW_BYTES
    layout = RowLayout(
        BLOCK,
        ROW_BYTES,
        page,
        LAYERS * page,
        tuple(layer * host_rows * ROW_BYTES for layer in range(LAYERS)),
        tuple(layer * page for layer in range(LAYERS)),
    )
    host = torch.from_numpy(rng.integers(0, 256, LAYERS * host_rows * ROW_BYTES, np.uint8))
    slab = torch.zeros(4 * rows * LAYERS * ROW_BYTES, dtype=torch.uint8)
    source = np.sort(rng.choice(host_rows, rows, replace=False))
    target = rng.permutation(rows)
    swaps = [torch.from_numpy(a).view(1, rows) for a in (source, target)]
    counts = torch.tensor([rows], dtype=torch.int32)
    by_layer = host.numpy().reshape(LAYERS, host_rows, ROW_BYTES)
    packed = np.zeros((LAYERS, rows, ROW_BYTES), np.uint8)

    def row_copies() -> None:
        for layer in range(LAYERS):
            np.take(by_layer[layer], source, axis=0, out=packed[layer], mode="clip")

    tries = 6 * repeats
    moved = rows * LAYERS * ROW_BYTES
    call = partial(gather, host, slab, layout, swaps[0], swaps[1], counts)
    seconds = {name: best_of(tries, partial(call, backend=name)) for name in BACKENDS}
    by_index = best_of(tries, row_copies)
    whole = best_of(tries, partial(np.copyto, packed.reshape(-1), host.numpy()[:moved]))
    return {
        "gather_gb_per_s": moved / seconds["cpp"] / 1e9,
        "gather_torch_gb_per_s": moved / seconds["torch"] / 1e9,
        "memcpy_by_index_gb_per_s": moved / by_index / 1e9,
        "memcpy_contiguous_gb_per_s": moved / whole / 1e9,
        "gather_over_memcpy": seconds["cpp"] / by_index,
    }


def _capacity_figures(repeats: int) -> dict[str, float]:
    """Microseconds to halve and to restore the capacity of a full state row, moves not copied."""
    inputs = make_inputs(REFERENCE, 16, seed=4)
    half = REFERENCE.capacity // 2
    shrinks, grows, resets = [], [], []
    for _ in range(repeats):
        _, state = run_steps(REFERENCE, inputs, "cpp", sample_period=16)
        shrinks.append(timed(partial(set_capacity, state, 0, half)))
        grows.append(timed(partial(set_capacity, state, 0, REFERENCE.capacity)))
        resets.append(timed(partial(reset, state, 0, capacity=half)))
    return {
        "shrink_us": min(shrinks) * 1e6,
        "grow_us": min(grows) * 1e6,
        "reset_us": min(resets) * 1e6,
    }


def table(figures: dict[str, Any]) -> str:
    lines = [
        f"{'backend':8} {'k':>5} {'capacity':>8} {'q':>2} {'requests':>8} {'us/request':>11} miss"
    ]
    lines += [
        f"{row['backend']:8} {row['k']:5} {row['capacity']:8} {row['q']:2} {row['requests']:8} "
        f"{row['us_per_request']:11.1f} {row['miss_ratio']:6.1%}"
        for row in figures["rows"]
    ]
    lines += [f"{name}: {value:.3g}" for name, value in figures.items() if isinstance(value, float)]
    lines.append(kernels_gpu.table(figures["gpu"]) if figures["gpu"] else "gpu: no CUDA device")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
