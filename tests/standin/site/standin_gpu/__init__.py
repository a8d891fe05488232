"""Cards that are not there: vLLM's CUDA worker on CPU tensors, for tests.

A platform plugin of vLLM, found by every process whose PYTHONPATH names this folder. vLLM's own
platform, worker, model runner, model, connectors and planner run; what is compiled for CUDA is
stood in for (`device`, `compiled`). It leaves the start method of processes alone.
"""

from __future__ import annotations

import os
import sys


def register() -> str:
    """Entry point of group ``vllm.platform_plugins``: the platform's class, by name."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    from standin_gpu.device import pretend

    pretend()
    # The build's version says "cpu", for which vLLM would look for another Triton.
    sys.modules["vllm.platforms"].vllm_version_matches_substr = lambda text: False
    return "standin_gpu.platform.StandInPlatform"
