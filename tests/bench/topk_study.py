"""What the reference node's indexer selects: ``python -m tests.bench.topk_study``.

Decodes long requests on the real engine, records every top-k set, and replays the sets through
the resolver: overlap from step to step, the union of several rows (what speculative rows of one
step would need), and the miss ratio by multiplier, measured and predicted. Writes JSON, and with
``--svg`` a plot of two panels as SVG text.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from hisparsed.engine.reference.hot import DecodeBatch
from hisparsed.kernels.api import Geometry, ResolverState, miss_ratio_curve, resolve

_WIDTH, _HEIGHT, _MARGIN = 360, 260, 48
_STYLE = (
    "text{font:12px sans-serif;fill:#333}.axis{stroke:#888}.grid{stroke:#ddd}"
    ".measured{fill:none;stroke:#1b6ca8;stroke-width:2}.dot{fill:#1b6ca8}"
    ".below{fill:none;stroke:#d1495b}.above{fill:none;stroke:#2e8b57}.bar{fill:#1b6ca8}"
)


def plot_svg(
    misses: Mapping[float, float],
    predicted_below: Mapping[float, float],
    predicted_above: Mapping[float, float],
    unions: Mapping[int, float],
) -> str:
    """Left: miss ratio by multiplier (line measured, circles from octiles at 5x, diamonds from
    ghosts at 2x). Right: union of consecutive rows' top-k in multiples of top-k, as bars."""
    top = max(*misses.values(), *predicted_below.values(), *predicted_above.values()) * 1.15

    def x(multiplier: float) -> float:
        return _MARGIN + (multiplier - 1) / 4 * (_WIDTH - 2 * _MARGIN)

    def y(ratio: float) -> float:
        return _HEIGHT - _MARGIN - ratio / top * (_HEIGHT - 2 * _MARGIN)

    parts = [_frame(0, "miss ratio by multiplier", "hot rows / top-k")]
    for tenth in range(int(top * 20) + 1):
        ratio = tenth / 20
        parts.append(
            f'<line class="grid" x1="{_MARGIN}" x2="{_WIDTH - _MARGIN}" '
            f'y1="{y(ratio):.1f}" y2="{y(ratio):.1f}"/>'
            f'<text x="{_MARGIN - 6}" y="{y(ratio) + 4:.1f}" text-anchor="end">{ratio:.0%}</text>'
        )
    parts += [
        f'<text x="{x(m):.1f}" y="{_HEIGHT - _MARGIN + 16}" text-anchor="middle">{m}x</text>'
        for m in (1, 2, 3, 4, 5)
    ]
    line = " ".join(f"{x(m):.1f},{y(ratio):.1f}" for m, ratio in sorted(misses.items()))
    parts.append(f'<polyline class="measured" points="{line}"/>')
    parts += [
        f'<circle class="dot" cx="{x(m):.1f}" cy="{y(r):.1f}" r="3"/>' for m, r in misses.items()
    ]
    parts += [
        f'<circle class="below" cx="{x(m):.1f}" cy="{y(r):.1f}" r="6"/>'
        for m, r in predicted_below.items()
    ]
    parts += [
        f'<path class="above" d="M{x(m):.1f} {y(r) - 7:.1f}l7 7l-7 7l-7 -7z"/>'
        for m, r in predicted_above.items()
        if m <= 5
    ]
    parts.append(
        f'<text x="{_WIDTH / 2}" y="{_MARGIN - 6}" text-anchor="middle">dots measured, circles '
        "octiles at 5x, diamonds ghosts at 2x</text>"
    )
    parts.append(_frame(_WIDTH, "union of consecutive rows", "rows in one step"))
    parts += _bars(unions)
    body = "".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * _WIDTH}" height="{_HEIGHT}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>{body}</svg>\n'
    )


def _frame(left: int, title: str, below: str) -> str:
    middle = left + _WIDTH / 2
    return (
        f'<text x="{middle}" y="20" text-anchor="middle" font-weight="bold">{title}</text>'
        f'<text x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">{below}</text>'
        f'<line class="axis" x1="{left + _MARGIN}" x2="{left + _WIDTH - _MARGIN}" '
        f'y1="{_HEIGHT - _MARGIN}" y2="{_HEIGHT - _MARGIN}"/>'
    )


def _bars(unions: Mapping[int, float]) -> list[str]:
    span = (_WIDTH - 2 * _MARGIN) / len(unions)
    height = (_HEIGHT - 2 * _MARGIN) / (max(unions.values()) * 1.15)
    bars = []
    for index, (rows, union) in enumerate(unions.items()):
        left = _WIDTH + _MARGIN + index * span + span * 0.2
        top = _HEIGHT - _MARGIN - union * height
        bars.append(
            f'<rect class="bar" x="{left:.1f}" y="{top:.1f}" width="{span * 0.6:.1f}" '
            f'height="{union * height:.1f}"/>'
            f'<text x="{left + span * 0.3:.1f}" y="{top - 5:.1f}" text-anchor="middle">'
            f"{union:.2f}x</text>"
            f'<text x="{left + span * 0.3:.1f}" y="{_HEIGHT - _MARGIN + 16}" '
            f'text-anchor="middle">{rows}</text>'
        )
    return bars


BLOCK = 16
MULTIPLIERS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)
WARM_UP_STEPS = 50
"""Cold fill of a fresh hot buffer is not what a running request sees."""

Selections = dict[tuple[int, int], list[torch.Tensor]]
"""By (index group, state row): each step's top-k positions, int32 ``[K]``."""


@dataclass(frozen=True)
class Study:
    """Fractions of K (overlap, unions) and of references (misses); steps are per request."""

    topk: int
    requests: int
    steps: int
    context_tokens: int
    overlap: float
    unions: dict[int, float]
    misses: dict[float, float]
    predicted_below: dict[float, float]
    """From one run at 5x, by octiles."""
    predicted_above: dict[float, float]
    """From one run at 2x, by ghosts."""


def record_selections(requests: int, prompt: int, steps: int, folder: Path) -> Selections:
    """Decode ``steps`` tokens of ``requests`` prompts and keep what the indexer selected."""
    from vllm import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    from hisparsed.config.node import NodeConfig
    from hisparsed.config.sections import ReferenceConfig
    from hisparsed.engine.reference.launch import vllm_config as reference_vllm_config

    reference = ReferenceConfig(gpu_blocks=8000, max_num_seqs=requests, max_model_len=4096)
    config = NodeConfig(
        node="reference", host_budget=256 << 20, state_dir=folder, reference=reference
    )
    engine = LLMEngine.from_vllm_config(reference_vllm_config(config, max_multiplier=4.0))
    selections: Selections = defaultdict(list)
    hot: Any = engine.engine_core.engine_core.model_executor._hot
    locate = hot.locate

    def locate_and_record(group: int, chosen: torch.Tensor, batch: DecodeBatch) -> Any:
        for row, positions in zip(batch.request_ids.tolist(), chosen, strict=True):
            selections[group, row].append(positions.clone())
        return locate(group, chosen, batch)

    hot.locate = locate_and_record
    rng = random.Random(0)
    for index in range(requests):
        tokens = [rng.randrange(32, 127) for _ in range(prompt)]
        params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
        engine.add_request(f"r{index}", {"prompt_token_ids": tokens}, params)
    while engine.has_unfinished_requests():
        engine.step()
    return selections


def replay_misses(
    sets: list[torch.Tensor], multiplier: float, positions: int
) -> tuple[float, ResolverState]:
    """Miss fraction of one request's sets in a hot buffer of ``multiplier``, and its state."""
    topk = sets[0].numel()
    capacity = int(multiplier * topk)
    pages = -(-positions // BLOCK)
    blocks = -(-int(MULTIPLIERS[-1] * topk) // BLOCK)
    state = ResolverState.create(1, blocks * BLOCK, positions, sample_period=1, ghost_every=8)
    state.capacity[0] = capacity
    geometry = Geometry(
        block_size=BLOCK,
        attention_block_stride=BLOCK,
        slab_blocks=blocks + 1,
        host_blocks=pages + 1,
    )
    source = torch.arange(1, pages + 1, dtype=torch.int32).view(1, -1)
    resident = torch.zeros((1, pages), dtype=torch.int32)
    hot = torch.arange(1, blocks + 1, dtype=torch.int32).view(1, -1)
    zero = torch.zeros(1, dtype=torch.int32)
    for step, chosen in enumerate(sets):
        if step == WARM_UP_STEPS:
            state.counters.zero_()
            state.octile.zero_()
            state.octile_misses.zero_()
            state.ghost.zero_()
        resolve(state, geometry, chosen.view(1, -1), zero, zero, source, resident, hot)
    hits, loads = int(state.counters[0, 2]), int(state.counters[0, 3])
    return loads / max(1, hits + loads), state


def study(requests: int, prompt: int, steps: int) -> Study:
    """Run everything; a minute on one core at 2 x 1,000 steps."""
    with tempfile.TemporaryDirectory(prefix="hisparsed-topk-") as name:
        selections = record_selections(requests, prompt, steps, Path(name))
    runs = list(selections.values())
    topk = runs[0][0].numel()
    positions = prompt + steps + BLOCK
    sets = [[set(step.tolist()) for step in run] for run in runs]
    overlaps = [len(now & before) / topk for run in sets for before, now in pairwise(run)]
    unions = {
        rows: _mean(
            [
                len(set().union(*run[at : at + rows])) / topk
                for run in sets
                for at in range(0, len(run) - rows, rows)
            ]
        )
        for rows in (1, 2, 3, 4, 5)
    }
    misses = {m: _mean([replay_misses(run, m, positions)[0] for run in runs]) for m in MULTIPLIERS}
    return Study(
        topk=topk,
        requests=requests,
        steps=steps,
        context_tokens=prompt,
        overlap=_mean(overlaps),
        unions=unions,
        misses=misses,
        predicted_below=_predict(runs, MULTIPLIERS[-1], positions, above=False),
        predicted_above=_predict(runs, 2.0, positions, above=True),
    )


def _predict(
    runs: list[list[torch.Tensor]], at: float, positions: int, *, above: bool
) -> dict[float, float]:
    topk = runs[0][0].numel()
    predictions: dict[float, list[float]] = defaultdict(list)
    for run in runs:
        curve = miss_ratio_curve(replay_misses(run, at, positions)[1], 0)
        if curve is None:
            continue
        for rows, ratio in zip(curve.capacities, curve.miss_ratios, strict=True):
            wanted = rows > curve.exact_to if above else topk <= rows <= curve.exact_to
            if wanted:
                predictions[rows / topk].append(ratio)
    return {multiplier: _mean(ratios) for multiplier, ratios in sorted(predictions.items())}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=1200)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--svg", type=Path, help="write the plot here")
    arguments = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HISPARSED_ENGINE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    found = study(arguments.requests, arguments.prompt, arguments.steps)
    if arguments.svg is not None:
        arguments.svg.write_text(
            plot_svg(found.misses, found.predicted_below, found.predicted_above, found.unions),
            encoding="utf-8",
        )
    sys.stdout.write(json.dumps(asdict(found)) + "\n")


if __name__ == "__main__":
    main()
