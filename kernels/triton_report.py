"""``python -m hisparsed.kernels.triton_report [--json] [--sm 100]``: the resources that the kernels
use on an SM.

Compiles every Triton kernel for sm_90 (or another) as the launcher would, with no GPU, and reads
registers, stack and shared memory from the machine code. Says nothing about time.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hisparsed.kernels import triton_backend
from hisparsed.kernels.geometry import Geometry, RowLayout
from hisparsed.kernels.resolution import Resolution
from hisparsed.kernels.state import ResolverState
from hisparsed.kernels.step import Step
from hisparsed.kernels.triton_language import Launch

K = 2048
CAPACITIES = (2048, 4096, 5120, 16384)
_BLOCK = 64
_POSITIONS = 131072
_ROWS = 2
_TYPES = {
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hisparsed.kernels.triton_report")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--sm", type=int, default=90, help="compute capability, two digits or more")
    arguments = parser.parse_args()
    target = GPUTarget("cuda", arguments.sm, 32)
    figures = [
        resources(launch, target) | {"capacity": capacity}
        for capacity in CAPACITIES
        for launch in step_launches(capacity)
    ]
    figures.append(resources(row_gather(), target) | {"capacity": None})
    report = {
        "target": f"sm_{arguments.sm}",
        "k": K,
        "triton": triton.__version__,
        "kernels": figures,
    }
    sys.stdout.write((json.dumps(report) if arguments.json else table(figures)) + "\n")


def step_launches(capacity: int) -> list[Launch]:
    """The launches of one step of top-k ``K`` on GLM-5.x block sizes."""

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    pages = _POSITIONS // _BLOCK
    return triton_backend.resolve_launches(
        ResolverState.create(_ROWS, capacity, _POSITIONS),
        Step(
            Geometry(_BLOCK, 320, slab_blocks=20000, host_blocks=160000, resident_by_state=True),
            topk=ints(_ROWS, K),
            request_ids=ints(_ROWS),
            state_of_request=ints(_ROWS),
            source_table=ints(_ROWS, pages),
            resident_table=ints(_ROWS, pages),
            hot_table=ints(_ROWS, capacity // _BLOCK),
            scratch_table=ints(16),
        ),
        Resolution.create(_ROWS, K, index_dtype=torch.int32),
    )


def row_gather() -> Launch:
    """The gather of 656-B rows on four layers."""
    page = _BLOCK * 656
    layers = tuple(layer * page for layer in range(4))
    memory = torch.zeros(4 * page, dtype=torch.uint8)
    rows = torch.zeros((_ROWS, K), dtype=torch.int64)
    layout = RowLayout(_BLOCK, 656, 4 * page, 4 * page, layers, layers)
    counts = torch.zeros(_ROWS, dtype=torch.int32)
    return triton_backend.gather_launch(memory, memory, layout, rows, rows, counts)


def resources(launch: Launch, target: GPUTarget) -> dict[str, Any]:
    """Compile one launch for ``target``; registers per thread, bytes of stack and shared memory.

    Raises ``RuntimeError`` where the tool that reads machine code does not run.
    """
    compiled = triton.compile(_source(launch), target=target, options={"num_warps": launch.warps})
    usage = _usage(compiled.asm["cubin"])
    return {
        "kernel": launch.kernel.__name__,
        "warps": launch.warps,
        "registers": usage["REG"],
        "stack_bytes": usage["STACK"],
        "shared_bytes": int(compiled.metadata.shared),
    }


def _source(launch: Launch) -> Any:
    """The properties that the launcher would specialise on: types, 16-byte alignment, and numbers
    that are 1."""
    signature: dict[str, str] = {}
    constants: dict[str, int] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        value = launch.arguments[name]
        if isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
            aligned = not parameter.do_not_specialize_on_alignment
        elif parameter.is_constexpr or (value == 1 and not parameter.do_not_specialize):
            signature[name], constants[name] = "constexpr", value
            continue
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % 16 == 0 and not parameter.do_not_specialize
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def _usage(cubin: bytes) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        try:
            said = subprocess.run(  # noqa: S603
                [tool, "--dump-resource-usage", str(path)],
                capture_output=True,
                text=True,
                check=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise RuntimeError(f"cuobjdump, which ships with Triton, does not run: {error}") from (
                error
            )
    return {name: int(figure) for name, figure in re.findall(r"(REG|STACK):(\d+)", said.stdout)}


def table(figures: list[dict[str, Any]]) -> str:
    lines = [f"{'kernel':12} {'capacity':>8} {'warps':>5} {'registers':>9} {'stack':>5} shared"]
    lines += [
        f"{row['kernel']:12} {row['capacity'] or '':>8} {row['warps']:5} {row['registers']:9} "
        f"{row['stack_bytes']:5} {row['shared_bytes']:6}"
        for row in figures
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
