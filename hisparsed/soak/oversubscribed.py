"""What admission is worth when the live set is larger than the pools can hold.

``python -m hisparsed.soak.oversubscribed --seeds 5``: the same sessions on the in-process
reference engine, in vLLM's order of arrival and under the policy's admission, in virtual time.
Only admission may act; the split stands at equal reach. Says nothing about a GPU's speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

from hisparsed.config.node import NodeConfig
from hisparsed.config.reference import ReferenceConfig
from hisparsed.control.observe import geometry_of
from hisparsed.engine.messages import EngineCommand
from hisparsed.policy.reach import equal_reach_blocks, reach_at
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Geometry
from hisparsed.replay.figures import figures
from hisparsed.replay.scale import scale_trace
from hisparsed.replay.trace import load_trace
from hisparsed.soak.engine import InProcessEngine, VirtualClock
from hisparsed.soak.result import percentile, rounded
from hisparsed.soak.virtual_load import Load, Served, serve

ORDERS = {
    "vLLM's order": {"order": "arrival"},
    "as shipped": {},
    "without the share": {"oldest_share": "0%"},
}
"""By name, what a policy's `admission` has beside ``max_wait``."""
LIVE_SET_OF_REACH = 1.3
LOAD = Load(clients=40, think_s=6.0, warm_up_s=40.0, measured_s=200.0)
MAX_WAIT_S = 120.0
_SCALE = Fraction(1, 64)
_MAX_MODEL_LEN = 1024
_MARGIN = 0.2


@dataclass(frozen=True)
class Row:
    """One run; times are seconds of the engine's clock, waits of unanswered calls included."""

    order: str
    seed: int
    completed: int
    ttft_s_p50: float | None
    ttft_s_p99: float | None
    longest_wait_s: float | None
    starved: int
    """Calls that waited longer than the policy's ``max_wait``."""
    hit_share: float
    held_first_share: float
    steps: int


def policy_of(order: str) -> Policy:
    """Only admission acts; ``order`` is one of ``ORDERS``."""
    return Policy.model_validate(
        {
            "version": 1,
            "levers": {name: {"mode": "off"} for name in ("split", "multiplier", "watermark")},
            "admission": {**ORDERS[order], "max_wait": f"{MAX_WAIT_S:g}s"},
        }
    )


def node_of(folder: Path) -> NodeConfig:
    """A node whose GPU is no bottleneck: host memory is."""
    return NodeConfig(
        node="reference",
        host_budget=48 << 20,
        reference=ReferenceConfig(
            layers=4,
            index_groups=1,
            index_topk=16,
            gpu_blocks=700,
            max_model_len=_MAX_MODEL_LEN,
            max_num_seqs=8,
            max_num_batched_tokens=256,
        ),
        state_dir=folder,
    )


def shared_blocks_for(geometry: Geometry, reach_tokens: float) -> tuple[int, int]:
    """The fewest host blocks whose equal-reach split reaches so far, and the lent ones of them."""
    for shared in range(2, geometry.budget_blocks + 1):
        lent = equal_reach_blocks(geometry, _MARGIN, 0, 0, shared)
        if reach_at(geometry, lent, 0, 0, shared).min_tokens >= reach_tokens:
            return shared, lent
    raise ValueError(
        f"a reach of {reach_tokens:.0f} tokens needs more than {geometry.budget_blocks} host blocks"
    )


def run_one(order: str, seed: int, load: Load = LOAD) -> Row:
    """One order on a fresh engine."""
    trace = scale_trace(load_trace(), _SCALE, _MAX_MODEL_LEN)
    live_tokens = figures(trace.sessions, trace.scale, load.clients).mean_live_set_tokens
    clock = VirtualClock()
    with tempfile.TemporaryDirectory(prefix="hisparsed-oversubscribed-") as name:
        engine = InProcessEngine(node_of(Path(name)), max_multiplier=2.0, clock=clock)
        try:
            geometry = geometry_of(engine.report().geometry)
            shared, lent = shared_blocks_for(geometry, live_tokens / LIVE_SET_OF_REACH)
            engine.apply(
                EngineCommand(
                    reserve_target_blocks=geometry.budget_blocks - shared,
                    offload_target_blocks=lent,
                    multiplier=2.0,
                )
            )
            served = serve(engine, clock, trace, load, policy_of(order), seed)
        finally:
            engine.close()
    return _row(order, seed, served)


def _row(order: str, seed: int, served: Served) -> Row:
    waits = served.ttft_s + served.unanswered_wait_s
    return Row(
        order=order,
        seed=seed,
        completed=served.completed,
        ttft_s_p50=rounded(percentile(waits, 0.5), 2),
        ttft_s_p99=rounded(percentile(waits, 0.99), 2),
        longest_wait_s=rounded(max(waits, default=None), 2),
        starved=sum(wait > MAX_WAIT_S for wait in waits),
        hit_share=round(served.hit_tokens / max(1, served.prompt_tokens), 3),
        held_first_share=round(served.held_first_share, 3),
        steps=served.steps,
    )


def table(rows: list[Row]) -> str:
    """The rows for a person."""
    head = f"{'order':<20}{'seed':>5}{'calls':>8}{'TTFT p50':>10}{'p99':>8}{'max':>8}{'starved':>9}"
    lines = [head + f"{'hits':>7}"]
    for order in ORDERS:
        lines += [
            f"{order:<20}{row.seed:>5}{row.completed:>8}{row.ttft_s_p50 or 0:>10.2f}"
            f"{row.ttft_s_p99 or 0:>8.2f}{row.longest_wait_s or 0:>8.2f}{row.starved:>9}"
            f"{row.hit_share:>7.0%}"
            for row in rows
            if row.order == order
        ]
    return "\n".join(lines)


def main() -> None:
    """Run all seeds in every order; the last line of ``--json`` is one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m hisparsed.soak.oversubscribed")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds, from 0")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for seed in range(arguments.seeds):
        for order in ORDERS:
            rows.append(run_one(order, seed))
            sys.stderr.write(table(rows[-1:]).splitlines()[-1] + "\n")
    (sys.stderr if arguments.json else sys.stdout).write(table(rows) + "\n")
    if arguments.json:
        document = {
            "live_set_of_reach": LIVE_SET_OF_REACH,
            "load": asdict(LOAD),
            "rows": [asdict(row) for row in rows],
        }
        sys.stdout.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
