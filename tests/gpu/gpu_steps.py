"""The steps of the GPU suite, in the order in which they run: what matters most comes first."""

from __future__ import annotations

from functools import partial

from gpu_engine import tokens
from gpu_files import HERE, run_file
from gpu_machine import environment, kernel_timings, pin_time
from gpu_serve import serve_and_ask
from gpu_suite import Step

WITHIN_S = 600.0
_SERVE_S = 150.0

STEPS = (
    Step("environment", "what this machine is", 60, environment, needs=()),
    Step(
        "kernels",
        "our Triton kernels give the C++ backend's integers, in graphs too",
        150,
        partial(run_file, HERE / "test_triton_on_gpu.py"),
    ),
    Step(
        "kernels-against-vllm",
        "our resolver and vLLM's own operator make attention read the same bytes",
        60,
        partial(run_file, HERE / "test_against_vllm_op.py"),
    ),
    Step(
        "runtime",
        "our resolver behind vLLM's runtimes: leases move, graphs are replayed, bytes are right",
        90,
        partial(run_file, HERE / "test_residency_on_gpu.py"),
    ),
    Step(
        "tokens-vllm",
        "tiny model, vLLM's kernels: equal tokens with room, from the host, while levers move",
        120,
        partial(tokens, "vllm", graphs=False),
    ),
    Step(
        "tokens-hisparsed",
        "the same with our kernels, hot buffers of different sizes",
        120,
        partial(tokens, "hisparsed", graphs=False),
    ),
    Step(
        "tokens-hisparsed-graphs",
        "the same with decode steps recorded as graphs",
        150,
        partial(tokens, "hisparsed", graphs=True),
    ),
    Step(
        "offload",
        "chunks of indexer KV to lent host blocks and back, and how fast",
        60,
        partial(run_file, HERE / "test_offload_on_gpu.py"),
    ),
    Step("timings", "our kernels and vLLM's operator on the same steps", 90, kernel_timings),
    Step("pin", "how long registering host memory takes", 60, pin_time),
    Step(
        "canary",
        "the daemon serves the tiny model and its canary answers",
        _SERVE_S + 30,
        partial(serve_and_ask, _SERVE_S),
    ),
)
