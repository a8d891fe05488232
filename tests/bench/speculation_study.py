"""Selections, misses and cost of speculative rows on the reference node.

``python -m tests.bench.speculation_study`` decodes the same requests one by one and with drafts,
on a slab that holds all pages and on one that holds few, at several lease sizes. Prints JSON;
figures are of the decode phase only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hisparsed.config.node import NodeConfig
from hisparsed.config.sections import ReferenceConfig
from hisparsed.engine.plugin import control
from hisparsed.engine.reference.hot import DecodeBatch
from hisparsed.engine.reference.launch import vllm_config as reference_vllm_config

_AMPLE_BLOCKS = 4000
_LARGEST_LEASE = 5.0
_LEASE_BLOCKS = 8
"""GPU blocks of one top-k over both index groups of the default model."""


@dataclass(frozen=True)
class Decoding:
    """One run. ``lease`` and ``union`` are in top-k; the fractions are of distinct host rows."""

    drafts: int
    lease: float
    gpu_blocks: int
    acceptance: float
    """Of the drafts; 0 without any."""
    tokens_a_step: float
    """Of one request."""
    union: float
    """Distinct tokens that the rows of one request select in a step, in one index group."""
    resident: float
    """Of the references."""
    misses: float
    spills: float
    dropped: int
    tokens_per_cpu_s: float


def decode(
    folder: Path, *, drafts: int, lease: float, gpu_blocks: int, requests: int, answer: int
) -> tuple[Decoding, list[list[int]]]:
    """Decode ``requests`` answers of ``answer`` tokens; the figures, and the tokens."""
    from vllm import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_vllm_config(
        reference_vllm_config(
            node_config(folder, drafts, gpu_blocks, requests),
            max_multiplier=_LARGEST_LEASE,
        )
    )
    core: Any = engine.engine_core.engine_core
    control(core, "apply", {"multiplier": lease})
    rng = random.Random(0)
    for index in range(requests):
        prompt = [rng.randrange(32, 127) for _ in range(1200)]
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        engine.add_request(f"r{index}", {"prompt_token_ids": prompt}, params)
    emitted: dict[str, list[int]] = {}
    while len(emitted) < requests:
        take(engine, emitted)
    unions = watch_unions(core.model_executor._hot)
    start = sum(map(len, emitted.values()))
    before = control(core, "report", {})["hot"]
    began = time.process_time()
    while engine.has_unfinished_requests():
        take(engine, emitted)
    took = time.process_time() - began
    hot = {
        name: value - before[name]
        for name, value in control(core, "report", {})["hot"].items()
        if name in ("references", "resident", "hits", "loads", "spills", "dropped")
    }
    counts = core.model_executor.draft_counts
    host_rows = max(
        1, hot["hits_total"] + hot["loads_total"] + hot["spills_total"] + hot["dropped_total"]
    )
    tokens = sum(map(len, emitted.values())) - start
    groups = core.model_executor._geometry.index_groups
    topk = core.model_executor._geometry.index_topk
    figures = Decoding(
        drafts=drafts,
        lease=lease,
        gpu_blocks=gpu_blocks,
        acceptance=counts.accepted / max(1, counts.proposed),
        tokens_a_step=tokens * groups / len(unions),
        union=sum(unions) / len(unions) / topk,
        resident=hot["resident_total"] / max(1, hot["references_total"]),
        misses=(hot["loads_total"] + hot["spills_total"]) / host_rows,
        spills=hot["spills_total"] / host_rows,
        dropped=hot["dropped_total"],
        tokens_per_cpu_s=tokens / took,
    )
    return figures, [emitted[f"r{index}"] for index in range(requests)]


def node_config(folder: Path, drafts: int, gpu_blocks: int, requests: int) -> NodeConfig:
    reference = ReferenceConfig(
        gpu_blocks=gpu_blocks,
        max_num_seqs=requests,
        max_model_len=2048,
        max_num_batched_tokens=256,
        speculative_tokens=drafts,
    )
    return NodeConfig(
        node="reference", host_budget=128 << 20, state_dir=folder, reference=reference
    )


def take(engine: Any, emitted: dict[str, list[int]]) -> None:
    for output in engine.step():
        name = output.request_id.split("-")[0]
        emitted[name] = list(output.outputs[0].token_ids)


def watch_unions(hot: Any) -> list[int]:
    """Distinct tokens selected by the rows of a request, one number per step and index group."""
    unions: list[int] = []
    locate = hot.locate

    def locate_and_count(group: int, chosen: torch.Tensor, batch: DecodeBatch) -> Any:
        start = 0
        for segment in batch.segments:
            rows = chosen[start : start + segment.count]
            unions.append(int(torch.bincount(rows[rows >= 0]).count_nonzero()))
            start += segment.count
        return locate(group, chosen, batch)

    hot.locate = locate_and_count
    return unions


def study(drafts: int, small_blocks: int, requests: int, answer: int) -> list[Decoding]:
    """All runs. Raises ``RuntimeError`` when any of them differs in a token."""
    runs = [(0, 1.0, _AMPLE_BLOCKS), (drafts, _LARGEST_LEASE, _AMPLE_BLOCKS)]
    small = [(0, lease) for lease in (1.0, 2.0)]
    small += [(drafts, lease) for lease in (1.0, 1.5, 2.0, 3.0, 4.0, 5.0)]
    # The same room for pages at every lease.
    runs += [(count, x, small_blocks + round(x * _LEASE_BLOCKS * requests)) for count, x in small]
    figures: list[Decoding] = []
    expected: list[list[int]] | None = None
    with tempfile.TemporaryDirectory(prefix="hisparsed-speculation-") as name:
        for count, lease, blocks in runs:
            found, tokens = decode(
                Path(name),
                drafts=count,
                lease=lease,
                gpu_blocks=blocks,
                requests=requests,
                answer=answer,
            )
            if expected is not None and tokens != expected:
                raise RuntimeError(f"tokens differ with {found}")
            expected = tokens
            figures.append(found)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=480, help="slab blocks apart from leases")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--answer", type=int, default=300)
    arguments = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HISPARSED_ENGINE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    found = study(arguments.drafts, arguments.blocks, arguments.requests, arguments.answer)
    sys.stdout.write(json.dumps([asdict(run) for run in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
