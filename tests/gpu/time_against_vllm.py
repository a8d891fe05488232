"""Times our resolver and vLLM's own op on the same steps, in one run, as graph replays.

A script, not a test: ``python tests/gpu/time_against_vllm.py``. Needs a CUDA device and a vLLM
whose op takes the arguments it had in 0.32; it reports where either is missing. vLLM evicts in
order of arrival, so miss ratios differ a little. Cases whose hot buffer is smaller than the rows of
one step are skipped: vLLM does not accept them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from tests.bench import kernels_gpu
from tests.bench.kernels_work import BLOCK, Case, Inputs, make_inputs

STEPS = 32
REPEATS = 20
ARGUMENTS = 25


def main() -> None:
    op = vllm_op()
    cases = [case for case in kernels_gpu.CASES if case.capacity >= case.q * case.k]
    for case in cases:
        ours = kernels_gpu.measure_case(case, STEPS, REPEATS)
        theirs = vllm_us(op, case)
        line = ours | {"vllm_resolve_us": theirs, "over_vllm": ours["resolve_us"] / theirs}
        sys.stdout.write(json.dumps(line) + "\n")


def vllm_op() -> Any:
    """vLLM's operator; exits with the reason where it cannot be called."""
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not hasattr(torch.ops._C_cache_ops, "hisparse_resolve_residency"):
        sys.exit("this vLLM has no hisparse_resolve_residency")
    op = torch.ops._C_cache_ops.hisparse_resolve_residency.default
    found = len(op._schema.arguments)
    if found != ARGUMENTS:
        sys.exit(f"vLLM's op takes {found} arguments, this script knows {ARGUMENTS}: {op._schema}")
    return op


def vllm_us(op: Any, case: Case) -> float:
    """Microseconds of one step."""
    device = torch.device("cuda")
    inputs = kernels_gpu.on_device(make_inputs(case, STEPS, seed=1), device)
    call = VllmCall(op, case, inputs)

    def resolve_all() -> None:
        for topk in inputs.steps:
            call(topk)

    return kernels_gpu.replay_us(resolve_all, REPEATS) / STEPS


class VllmCall:
    """vLLM's op with its own state, on the tables of the benchmark."""

    def __init__(self, op: Any, case: Case, inputs: Inputs) -> None:
        self.op, self.case, self.inputs = op, case, inputs
        rows, geometry = case.requests * case.q, inputs.geometry

        def ints(*shape: int, fill: int = 0) -> torch.Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device="cuda")

        row = (geometry.host_rows, kernels_gpu.ROW_BYTES)
        slab = (geometry.slab_blocks, BLOCK, kernels_gpu.ROW_BYTES)
        self.host = torch.zeros(row, dtype=torch.uint8, pin_memory=True)
        self.slab = torch.zeros(slab, dtype=torch.uint8, device="cuda")
        self.positions = ints(case.requests, case.capacity, fill=-1)
        order = torch.arange(case.capacity, dtype=torch.int16, device="cuda")
        self.order = order.repeat(case.requests, 1)
        self.stats = torch.zeros(2, dtype=torch.uint64, device="cuda")
        self.hot_rows, self.attention, self.swap_host, self.swap_device = (
            ints(rows, case.k) for _ in range(4)
        )
        self.valid, self.counts = ints(rows), ints(rows)

    def __call__(self, topk: torch.Tensor) -> None:
        case, inputs = self.case, self.inputs
        self.op(
            self.host,
            self.slab,
            inputs.hot,
            topk,
            self.hot_rows,
            self.positions,
            self.order,
            inputs.states,
            case.capacity,
            case.q * case.k,
            None,
            self.stats,
            self.attention,
            inputs.geometry.attention_block_stride,
            inputs.request_ids,
            inputs.source,
            BLOCK,
            None,
            self.valid,
            self.swap_host,
            self.swap_device,
            self.counts,
            inputs.resident,
            BLOCK,
            0,
        )


if __name__ == "__main__":
    main()
