"""vLLM's runtimes, our adapters and the Triton kernels together, as far as a CPU can show it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_the_triton_kernels_serve_vllms_runtimes() -> None:
    """In a process of its own: Triton decides once whether it interprets."""
    done = subprocess.run(
        [
            sys.executable,
            *("-m", "pytest", "-q", "-p", "no:cacheprovider"),
            str(HERE / "interpreted_residency.py"),
        ],
        cwd=HERE.parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
