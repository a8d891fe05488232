"""How long deciding takes, in CPU time: ``python -m tests.bench.policy [--json]``.

An hour of ticks on a busy node whose load wanders, with ghost lists and 64 requests with
miss curves, so that every law has work. Snapshots are made before the clock runs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass, replace

from hisparsed.policy.decide import decide
from hisparsed.policy.memory import Memory
from hisparsed.policy.schema import Policy
from hisparsed.policy.sharing import share_hot_budget
from hisparsed.policy.signals import (
    AdmissionOrder,
    AdmissionRules,
    GhostPoint,
    GpuPool,
    HiSparsePool,
    HotBuffers,
    LeasePoint,
    LiveSet,
    OffloadPool,
    PoolGeometry,
    Prefix,
    Progress,
    RequestHot,
    Requests,
    Snapshot,
    Tokens,
    Watermark,
)

TICKS = 3_600
REQUESTS = 64
_GEOMETRY = PoolGeometry(
    block_tokens=64,
    host_block_bytes=64 * 51_200,
    offload_chunk_tokens=64,
    offload_chunk_bytes=64 * 2_816,
    offload_copies=1,
    chunks_per_host_block=18,
    budget_blocks=160_000,
    max_model_len=262_144,
    topk=2_048,
    decode_query_len=1,
    gpu_blocks_total=90_000,
    hot_block_rows=64,
    hot_groups=21,
    max_lease_blocks=160,
    max_num_seqs=256,
    row_bytes=6_400,
    max_step_tokens=8_192,
)
_EDGES = (400, 1_600, 6_400, 15_200, 30_400)


@dataclass(frozen=True, slots=True)
class Figures:
    """Microseconds of single calls, and seconds for the hour; of the thread's CPU time."""

    ticks: int
    decide_p50_us: float
    decide_p99_us: float
    decide_max_us: float
    hour_s: float
    moves: int
    share_requests: int
    share_p50_us: float
    share_p99_us: float


def busy_policy() -> Policy:
    return Policy.model_validate(
        {
            "version": 1,
            "rebalance": {"strategy": "marginal-value"},
            "hot": {"sharing": "marginal-gain"},
        }
    )


def snapshots(ticks: int, seed: int = 1) -> list[Snapshot]:
    """One a second; levers stay where they are, as nothing follows the decisions."""
    rng = random.Random(seed)
    lent, out = 10_000, []
    in_use, waiting = 60_000, 4
    loads = ghost = steps = 0
    for tick in range(ticks):
        in_use = max(0, min(140_000, in_use + rng.randint(-900, 900)))
        waiting = max(0, min(20, waiting + rng.randint(-2, 2)))
        steps += 40
        loads += rng.randint(1_000, 3_000)
        ghost += rng.randint(0, 4_000)
        out.append(_snapshot(rng, tick, lent, in_use, waiting, loads, ghost, steps))
    return out


def _snapshot(
    rng: random.Random,
    tick: int,
    lent: int,
    in_use: int,
    waiting: int,
    loads: int,
    ghost: int,
    steps: int,
) -> Snapshot:
    capacity = _GEOMETRY.budget_blocks - lent
    points = tuple(GhostPoint(edge, ghost * (index + 1)) for index, edge in enumerate(_EDGES))
    idle = capacity - min(capacity, in_use)
    return Snapshot(
        at_s=float(tick),
        tick=tick,
        policy_generation=1,
        report_age_s=0.05,
        geometry=_GEOMETRY,
        hisparse=HiSparsePool(capacity, capacity, in_use, idle, 0, points),
        offload=OffloadPool(lent * 18, lent, lent, rng.randint(0, 400), lent * 18, points),
        pending_blocks=0,
        draining_blocks=0,
        head_need_blocks=300,
        gpu=GpuPool(90_000, rng.randint(0, 30_000), waiting > 2),
        requests=Requests(REQUESTS, waiting, tick // 100, 0, 8, REQUESTS - 8, tick, 0),
        hot=HotBuffers(2.0, steps * 900, steps * 700, loads, steps * 100, loads * 6_400),
        sessions=LiveSet(rng.randint(8_000_000, 13_000_000), 90),
        prefix=Prefix(tick * 9_000, tick * 10_000),
        tokens=Tokens(tick * 10_000, tick * 900),
        admission=AdmissionRules(AdmissionOrder.ARRIVAL, 30.0, 256, None, 10.0),
        watermark=Watermark(9_000, True),
        progress=Progress(steps, steps * 2_000),
        requests_hot=requests_hot(rng),
    )


def requests_hot(rng: random.Random) -> tuple[RequestHot, ...]:
    """Requests at 2x with curves of eight points, as octiles give them."""
    found = []
    for index in range(REQUESTS):
        misses, curve = rng.uniform(100, 900), []
        for blocks in range(32, 161, 16):
            curve.append(LeasePoint(blocks, misses))
            misses *= rng.uniform(0.4, 1.0)
        found.append(RequestHot(f"request-{index}", 64, 64, tuple(curve)))
    return tuple(found)


def measure(ticks: int = TICKS) -> Figures:
    policy, memory, moves = busy_policy(), Memory(), 0
    made = snapshots(ticks)
    took_us = []
    for snapshot in made:
        began_s = time.thread_time()
        decision, memory = decide(policy, snapshot, memory)
        took_us.append((time.thread_time() - began_s) * 1e6)
        moves += bool(decision.commands)
    shares_us = []
    for snapshot in made[:200]:
        began_s = time.thread_time()
        share_hot_budget(
            [
                replace(one, weight=1.0 + index % 3)
                for index, one in enumerate(snapshot.requests_hot)
            ],
            64 * REQUESTS,
            floor_blocks=32,
            ceiling_blocks=128,
            max_change_blocks=16,
        )
        shares_us.append((time.thread_time() - began_s) * 1e6)
    return Figures(
        ticks,
        _percentile(took_us, 0.5),
        _percentile(took_us, 0.99),
        max(took_us),
        sum(took_us) / 1e6,
        moves,
        REQUESTS,
        _percentile(shares_us, 0.5),
        _percentile(shares_us, 0.99),
    )


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.policy")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--ticks", type=int, default=TICKS, help="ticks of one second")
    options = parser.parse_args()
    figures = measure(options.ticks)
    values = {name: getattr(figures, name) for name in figures.__slots__}
    lines = [f"{name:16} {value:.6g}" for name, value in values.items()]
    sys.stdout.write((json.dumps(values) if options.json else "\n".join(lines)) + "\n")


if __name__ == "__main__":
    main()
