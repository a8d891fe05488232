"""The tiny DSA model on this GPU under our launch, in this process: engines for the token steps."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from gpu_suite import Figures
from gpu_tokens import Calls, compare

PROFILE = Path(__file__).parents[2] / "etc" / "profiles" / "one-gpu-tiny.yaml"
MULTIPLIER = 4.0


def tokens(kernels: str, *, graphs: bool) -> Figures:
    """Compare the rounds of an engine with ``kernels``; ``graphs`` records decode steps."""
    with TemporaryDirectory() as folder:
        engine = gpu_engine(kernels, Path(folder), graphs=graphs)
        return compare(engine, Calls())


def gpu_engine(kernels: str, folder: Path, *, graphs: bool) -> Any:
    """vLLM's engine with everything that the daemon would set for the profile."""
    from vllm.v1.engine.llm_engine import LLMEngine

    from hisparsed.config.node import load_node_config
    from hisparsed.engine.cuda.launch import vllm_config

    config = load_node_config(PROFILE, memory_bytes=psutil.virtual_memory().total).value
    arguments = dict(config.engine_args)
    if graphs:
        arguments |= {
            "enforce_eager": False,
            "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]},
        }
    config = config.model_copy(
        update={
            "cuda": config.cuda.model_copy(update={"kernels": kernels}),
            "engine_args": arguments,
            "state_dir": folder,
        }
    )
    return LLMEngine.from_vllm_config(vllm_config(config, max_multiplier=MULTIPLIER))
