"""Figures of the reference node: ``python -m tests.bench.engine [--json]``.

One run, in this process, no API: prefill and decode tokens per second at 8 running requests with
everything resident and with almost nothing resident, and what a report and an apply cost the engine
thread at 50 running requests. Ratios hold between machines, seconds do not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_PROMPT_TOKENS = 1536
_DECODE_TOKENS = 128
_REPEATS = 200


@dataclass(frozen=True)
class Throughput:
    """Tokens a second of the whole engine at ``running`` requests."""

    running: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    decode_step_ms: float
    resident_share: float


@dataclass(frozen=True)
class ControlCost:
    """Microseconds on the engine thread, at ``running`` requests."""

    running: int
    report_us_p50: float
    report_us_p99: float
    apply_us_p50: float
    apply_us_p99: float


def _engine(folder: Path, *, gpu_blocks: int, max_num_seqs: int) -> Any:
    from vllm.v1.engine.llm_engine import LLMEngine

    from hisparsed.config.node import NodeConfig
    from hisparsed.config.sections import ReferenceConfig
    from hisparsed.engine.reference.launch import vllm_config as reference_vllm_config

    config = NodeConfig(
        node="reference",
        host_budget=512 << 20,
        state_dir=folder,
        reference=ReferenceConfig(gpu_blocks=gpu_blocks, max_num_seqs=max_num_seqs),
    )
    engine = LLMEngine.from_vllm_config(reference_vllm_config(config, max_multiplier=4.0))
    _control(engine, "apply", {"offload_target_blocks": 2000, "multiplier": 2.0})
    return engine


def _control(engine: Any, action: str, payload: dict[str, Any]) -> dict[str, Any]:
    from hisparsed.engine.plugin import control

    return control(engine.engine_core.engine_core, action, payload)


def _add(engine: Any, count: int, prompt: int, decode: int) -> None:
    from vllm import SamplingParams

    rng = random.Random(0)
    for index in range(count):
        tokens = [rng.randrange(32, 127) for _ in range(prompt)]
        params = SamplingParams(temperature=0.0, max_tokens=decode, ignore_eos=True)
        engine.add_request(f"r{index}", {"prompt_token_ids": tokens}, params)


def measure_throughput(folder: Path, *, gpu_blocks: int, running: int = 8) -> Throughput:
    """Prefill until every request decodes, then decode until the first one ends."""
    engine = _engine(folder, gpu_blocks=gpu_blocks, max_num_seqs=running)
    _add(engine, running, _PROMPT_TOKENS, _DECODE_TOKENS)
    started = time.perf_counter()
    first: dict[str, int] = {}
    while len(first) < running:
        for output in engine.step():
            first.setdefault(output.request_id, len(output.outputs[0].token_ids))
    prefill_s = time.perf_counter() - started
    started = time.perf_counter()
    steps = 0
    finished = False
    while not finished:
        finished = any(output.finished for output in engine.step())
        steps += 1
    decode_s = time.perf_counter() - started
    hot = _control(engine, "report", {})["hot"]
    return Throughput(
        running=running,
        prefill_tokens_per_s=running * _PROMPT_TOKENS / prefill_s,
        decode_tokens_per_s=running * steps / decode_s,
        decode_step_ms=decode_s / steps * 1e3,
        resident_share=hot["resident_total"] / max(1, hot["references_total"]),
    )


def measure_control(folder: Path, *, running: int = 50) -> ControlCost:
    """Time reports and pool moves between the steps of a busy engine."""
    engine = _engine(folder, gpu_blocks=20_000, max_num_seqs=running)
    _add(engine, running, 512, 4 * _REPEATS)
    while _control(engine, "report", {})["requests"]["running"] < running:
        engine.step()
    reports, applies = [], []
    for index in range(_REPEATS):
        engine.step()
        reports.append(_control(engine, "report", {})["report_cost_s"] * 1e6)
        target = 2000 + 64 * (index % 2)
        applies.append(_control(engine, "apply", {"offload_target_blocks": target})["apply_us"])
    return ControlCost(
        running=running,
        report_us_p50=statistics.median(reports),
        report_us_p99=statistics.quantiles(reports, n=100)[98],
        apply_us_p50=statistics.median(applies),
        apply_us_p99=statistics.quantiles(applies, n=100)[98],
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.engine", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HISPARSED_ENGINE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory(prefix="hisparsed-bench-") as name:
        folder = Path(name)
        resident = measure_throughput(folder, gpu_blocks=8000)
        host = measure_throughput(folder, gpu_blocks=1250)
        cost = measure_control(folder)
    result = {
        "resident": asdict(resident),
        "host": asdict(host),
        "host_over_resident_decode": host.decode_tokens_per_s / resident.decode_tokens_per_s,
        "control": asdict(cost),
    }
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    for name, run in (("resident", resident), ("host", host)):
        sys.stdout.write(
            f"{name:9} {run.running} running: prefill {run.prefill_tokens_per_s:,.0f} tokens/s, "
            f"decode {run.decode_tokens_per_s:,.0f} tokens/s ({run.decode_step_ms:.2f} ms a "
            f"step), {run.resident_share:.0%} of references resident\n"
        )
    sys.stdout.write(
        f"control   {cost.running} running: report {cost.report_us_p50:.0f} us (p99 "
        f"{cost.report_us_p99:.0f}), pool move {cost.apply_us_p50:.0f} us (p99 "
        f"{cost.apply_us_p99:.0f})\n"
    )


if __name__ == "__main__":
    main()
