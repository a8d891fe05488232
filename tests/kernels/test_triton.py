"""The Triton backend without a GPU: interpreted against the oracle, and compiled for sm_90.

Triton decides when a kernel is defined whether it is interpreted or compiled, and vLLM defines
kernels in the process that runs the engine tests. Each set of interpreted tests therefore gets its
own process, and the environment variable never exists in this one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

triton_language = pytest.importorskip("hisparsed.kernels.triton_language")

pytestmark = pytest.mark.usefixtures("cpp_is_built")


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


# Threads are the C++ backend's; 64 requests are slow here and say no more than 17.
NOT_HERE = "not threads and not (do_not_mix and 64)"
ON_TRITON = f"{NOT_HERE} and (triton or walk or history)"
SHARED = ("test_resolver_errors.py", "test_resolver_random.py", "test_gather.py")
SLOW = ("test_resolver_behaviour.py", "test_resolver_lives.py", "interpreted_triton.py")


@pytest.mark.parametrize(
    ("modules", "chosen", "marks", "fewest"),
    [
        pytest.param(SHARED, ON_TRITON, "not long", 30, id="some"),
        pytest.param(
            *((*SHARED, *SLOW), NOT_HERE, "", 140),
            id="all",
            marks=[pytest.mark.long, pytest.mark.timeout(1200)],
        ),
    ],
)
def test_interpreted_kernels_pass(
    modules: tuple[str, ...], chosen: str, marks: str, fewest: int
) -> None:
    """The same tests as for the other backends, with Triton among them, and its own."""
    options = ["-q", "-p", "no:cacheprovider", "-k", chosen, "-m", marks]
    done = run(
        ["-m", "pytest", *options, *(str(HERE / module) for module in modules)],
        TRITON_INTERPRET="1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.splitlines()[-1]
    passed = re.match(r"(\d+) passed", summary)
    assert passed, summary
    assert int(passed[1]) >= fewest
    assert "skipped" not in summary


def test_other_backends_start_without_triton() -> None:
    code = (
        "import sys, torch\n"
        "from hisparsed.kernels import api, backends\n"
        "backends.pick('auto', torch.device('cpu'))\n"
        "sys.exit('triton' in sys.modules)\n"
    )
    assert run(["-c", code]).returncode == 0


def test_cpu_tensors_are_refused_where_triton_compiles() -> None:
    code = (
        "import torch\n"
        "from hisparsed.kernels import backends\n"
        "backends.pick('triton', torch.device('cpu'))\n"
    )
    done = run(["-c", code])
    assert "only where TRITON_INTERPRET=1 was set before Triton was imported" in done.stderr


@pytest.mark.parametrize("where", [0, 1])
def test_no_slice_of_a_step_makes_triton_compile_anew(where: int) -> None:
    """A kernel that compiled for an aligned step serves every other one, also in a capture."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    from hisparsed.kernels import triton_backend
    from hisparsed.kernels.triton_report import row_gather, step_launches

    assert not triton_backend.INTERPRETED
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    for launch in [*step_launches(4096), row_gather()]:
        kernel = launch.kernel
        of = create_function_from_signature(kernel.signature, kernel.params, backend)
        moved = {
            name: value.view(-1)[where:]
            if isinstance(value, torch.Tensor) and name not in triton_language.ALIGNED
            else value
            for name, value in launch.arguments.items()
        }
        for name in ("rows", "requests", "scratch_blocks"):
            if name in moved:
                moved[name] = (1, 32)[where]
        assert of(**moved)[1] == of(**launch.arguments)[1], kernel.__name__


@pytest.fixture
def compilers() -> None:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        pytest.skip("Triton is not installed")
    for tool in ("ptxas", "cuobjdump"):
        path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / tool
        try:
            subprocess.run([path, "--version"], capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"Triton's {tool} does not run here: {error}")


@pytest.mark.long
@pytest.mark.usefixtures("compilers")
def test_every_kernel_compiles_for_sm_90_and_fits_an_sm(tmp_path: Path) -> None:
    done = run(["-m", "hisparsed.kernels.triton_report", "--json"], TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    kernels = report["kernels"]
    names = {row["kernel"] for row in kernels}
    assert names == {"plan", "finalise", "gather_rows"}
    assert {row["capacity"] for row in kernels} == {2048, 4096, 5120, 16384, None}
    for row in kernels:
        assert row["stack_bytes"] == 0, f"{row} spills"
        assert row["registers"] * row["warps"] * 32 <= 65536, f"{row} does not fit an SM"
        assert row["shared_bytes"] <= 48 * 1024, row
