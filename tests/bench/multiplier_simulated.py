"""One corner of the multiplier's map on the simulated node, with one size or the policy's law.

The whole node, not a part of it: the GPU memory of a part holds only a few requests. Output tokens
per second are counted after a warm-up in which first prompts are computed. Results are kept, one
small file for each corner and size, and not run again.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from hisparsed.atomic_file import write_atomically
from hisparsed.config.node_description import NodeDescription
from hisparsed.replay.trace import BlockRun, Call, Session, Trace
from hisparsed.simulate.policies import choose_policy
from hisparsed.simulate.scenario import Scenario
from hisparsed.simulate.scenario import Traffic as Played
from hisparsed.simulate.workload import LATER_TOKENS, TURNS, TraceSessions
from tests.bench.multiplier_corners import Corner
from tests.bench.multiplier_model import ClosedForm, Traffic

COUNTED_S = 120.0
_LEAST_WARMUP_S = 60.0
_PROMPT_TOKENS_PER_S = 20_000
"""Slower than first prompts are computed, so that all are in the warm-up."""
_WAITING = 8
_ENDLESS = 400
"""Calls of a session whose prefix is always held."""


def corner_trace(traffic: Traffic, block_tokens: int) -> Trace:
    """One session: each call has its first call's prompt, but for ``LATER_TOKENS`` of its own."""
    full = traffic.context // block_tokens
    same = max(0, traffic.context - LATER_TOKENS) // block_tokens
    calls = []
    for turn in range(TURNS if traffic.first else _ENDLESS):
        own = same + turn * (full - same + 1)
        calls.append(
            Call(
                blocks=(BlockRun(0, same), BlockRun(own, full - same)),
                tail_block=own + full - same,
                input_tokens=traffic.context,
                output_tokens=traffic.answer,
                think_time_s=0.0,
                api_time_s=None,
            )
        )
    return Trace("corner", block_tokens, (Session("corner", tuple(calls), 0.0),))


def path_of(data: Path, corner: Corner, size: str) -> Path:
    setting, traffic = corner.setting, corner.traffic
    parts = [setting.drafts, setting.hidden, setting.misses, setting.spread, traffic.answer]
    parts += [traffic.context, traffic.users, round(traffic.first, 3)]
    return data / f"{'-'.join(f'{part:g}' for part in parts)}-{size}.json"


def kept(data: Path | None, corner: Corner, size: str) -> float | None:
    """Tokens per second of a run that was made; ``None`` where there is none."""
    if data is None or not path_of(data, corner, size).is_file():
        return None
    return float(json.loads(path_of(data, corner, size).read_text("utf-8"))["tokens_per_s"])


def _players(node: NodeDescription, traffic: Traffic) -> int:
    """Not all that wait: some do with every size, and more would change nothing."""
    smallest = ClosedForm(node).steady(traffic, 1.0)
    return min(traffic.users, _WAITING + (smallest.running if smallest else 0))


def simulate(node: NodeDescription, corner: Corner, size: str, data: Path) -> None:
    """Unless it was; ``size`` is a multiplier, or ``live`` for the shipped policy's law."""
    # vLLM takes seconds to import, and only a run needs it.
    from hisparsed.simulate.run import run_policy

    path = path_of(data, corner, size)
    if path.is_file():
        return
    described = corner.setting.of(node)
    traffic = replace(corner.traffic, users=_players(described, corner.traffic))
    tokens = node.engine.block_tokens
    warmup_s = _LEAST_WARMUP_S + traffic.users * traffic.context / _PROMPT_TOKENS_PER_S
    scenario = Scenario(
        described,
        (Played(TraceSessions(corner_trace(traffic, tokens), tokens), traffic.users),),
        node.host.budget,
        Fraction(1),
        warmup_s + COUNTED_S,
        warmup_s,
        users=traffic.users,
    )
    keys = (
        "" if size == "live" else "".join(f",hot.{key}={size}" for key in ("min", "start", "max"))
    )
    with tempfile.TemporaryDirectory() as folder:
        measures = run_policy(scenario, choose_policy(f"policy{keys}"), 0, work_folder=Path(folder))
    counted = [one for one in measures.samples if one.at_s >= warmup_s]
    first, last = counted[0], counted[-1]
    result = {
        "tokens_per_s": (last.generated_tokens - first.generated_tokens) / (last.at_s - first.at_s),
        "running": sum(one.running for one in counted) / len(counted),
        "multiplier": last.multiplier,
        "preemptions": measures.preemptions,
    }
    data.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(result).encode())
