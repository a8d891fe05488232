"""The benefit of admission when the live set is larger than the pools can hold.

``python -m tests.bench.oversubscribed --seeds 5``: the same sessions on the in-process reference
engine, in vLLM's order of arrival and under the policy's admission, in virtual time. A step costs a
fixed time and a time per token, so results depend on the engine and not on this machine. Closed
loop: a client sends its next call some time after its last answer. Only admission may act; the
split stays at equal reach. Says nothing about a GPU's speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from itertools import count
from pathlib import Path
from random import Random

from hisparsed.config.node import NodeConfig
from hisparsed.config.sections import ReferenceConfig
from hisparsed.control.observe import observe
from hisparsed.engine.port import ServingCounters
from hisparsed.policy.bounds import start_admission
from hisparsed.policy.decide import decide
from hisparsed.policy.decisions import EngineCommand
from hisparsed.policy.memory import Memory
from hisparsed.policy.reach import equal_reach_blocks, reach_at
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import AdmissionRules, EngineReport, PoolGeometry
from hisparsed.replay.scaled_trace import (
    PromptMaker,
    ScaledCall,
    ScaledTrace,
    TokenRange,
    figures,
    scale_trace,
)
from hisparsed.replay.trace import load_trace
from hisparsed.soak.engine import Engine, InProcessEngine, SteppedClock
from hisparsed.soak.result import percentile, rounded

STEP_S = 0.02
TOKEN_S = 0.001
_MIN_ANSWER, _MAX_ANSWER = 4, 16


@dataclass(frozen=True, slots=True)
class Load:
    """``clients`` sessions at a time, ``think_s`` between answer and next call on average."""

    clients: int
    think_s: float
    warm_up_s: float
    measured_s: float


@dataclass(slots=True)
class Served:
    """Calls sent after the warm-up. Times are seconds of the engine's clock."""

    completed: int = 0
    ttft_s: list[float] = field(default_factory=list)
    unanswered_wait_s: list[float] = field(default_factory=list)
    """Of calls without a first token when the time was up."""
    prompt_tokens: int = 0
    hit_tokens: int = 0
    order_changes: int = 0
    held_first_share: float = 0.0
    """Share of the measured time in which calls with a held prefix went first."""
    steps: int = 0


@dataclass(slots=True)
class _Client:
    calls: Iterator[tuple[PromptMaker, ScaledCall]]
    due_s: float


@dataclass(slots=True)
class _Open:
    client: _Client
    sent_s: float
    prompt_tokens: int
    answered: bool = False


def _scheduled(report: EngineReport) -> int:
    return report.progress.scheduled_tokens_total if report.progress is not None else 0


class PolicyAtWork:
    """Observes the engine and lets the policy decide, as the control loop does each tick."""

    def __init__(self, policy: Policy, engine: Engine, report: EngineReport) -> None:
        self._policy = policy
        self._engine = engine
        self._memory = Memory()
        self._tick = 0
        self.admission: AdmissionRules = start_admission(policy, report.geometry.max_num_seqs)
        self.order_changes = 0

    def tick(self, now_s: float) -> None:
        """One cycle."""
        self._tick += 1
        snapshot = observe(
            self._engine.report(),
            ServingCounters(),
            at_s=now_s,
            report_age_s=0.0,
            tick=self._tick,
            policy_generation=1,
            last_admission=self.admission,
        )
        decision, self._memory = decide(self._policy, snapshot, self._memory)
        command = decision.commands
        if not command:
            return
        self._engine.apply(command)
        if command.admission is not None:
            self.order_changes += command.admission.order is not self.admission.order
            self.admission = command.admission


def sessions_of(
    trace: ScaledTrace, seed: int, client: int, clients: int
) -> Iterator[tuple[PromptMaker, ScaledCall]]:
    """The endless calls of one client: shuffled sessions dealt out, the first one joined midway.

    Each lap over the trace has different prompts.
    """
    for lap in count():
        order = list(trace.sessions)
        Random(f"{seed} {lap}").shuffle(order)
        prompts = PromptMaker(trace.scale, seed * 1000 + lap, TokenRange())
        for position, session in enumerate(order[client::clients]):
            calls = session.calls
            if lap == 0 and position == 0:
                calls = calls[Random(f"{seed} {client}").randrange(len(calls)) :]
            for call in calls:
                yield prompts, call


def serve(
    engine: Engine,
    clock: SteppedClock,
    trace: ScaledTrace,
    load: Load,
    policy: Policy,
    seed: int,
) -> Served:
    """Serve ``load`` for warm-up and measured time; what became of the calls."""
    return _Serving(engine, clock, trace, load, policy, seed).run()


class _Serving:
    def __init__(
        self,
        engine: Engine,
        clock: SteppedClock,
        trace: ScaledTrace,
        load: Load,
        policy: Policy,
        seed: int,
    ) -> None:
        self._engine, self._clock, self._load = engine, clock, load
        self._rng = Random(f"{seed} thinking")
        self._measured_from_s = clock() + load.warm_up_s
        self._end_s = self._measured_from_s + load.measured_s
        report = engine.report()
        self._scheduled = _scheduled(report)
        self._policy = PolicyAtWork(policy, engine, report)
        self._tick_s = policy.tick
        self._next_tick_s = clock()
        self._idle = [
            _Client(
                sessions_of(trace, seed, index, load.clients),
                clock() + self._rng.uniform(0.0, load.think_s),
            )
            for index in range(load.clients)
        ]
        self._open: dict[str, _Open] = {}
        self._sent = 0
        self._held_first_s = 0.0
        self._served = Served()

    def run(self) -> Served:
        while self._clock() < self._end_s:
            self._send()
            if self._clock() >= self._next_tick_s:
                self._policy.tick(self._clock())
                self._next_tick_s += self._tick_s
            if self._open:
                self._step()
            else:
                self._clock.now_s = min(self._next_tick_s, *(one.due_s for one in self._idle))
        self._served.unanswered_wait_s = [
            self._clock() - one.sent_s
            for one in self._open.values()
            if not one.answered and one.sent_s >= self._measured_from_s
        ]
        self._served.order_changes = self._policy.order_changes
        self._served.held_first_share = min(1.0, self._held_first_s / self._load.measured_s)
        self._finish_open()
        return self._served

    def _finish_open(self) -> None:
        for name in self._open:
            self._engine.abort(name)

    def _send(self) -> None:
        now_s = self._clock()
        due = [one for one in self._idle if one.due_s <= now_s]
        for client in sorted(due, key=lambda one: one.due_s):
            self._idle.remove(client)
            prompts, call = next(client.calls)
            self._sent += 1
            name = f"call-{self._sent}"
            self._open[name] = _Open(client, now_s, call.input_tokens)
            answer = min(_MAX_ANSWER, max(_MIN_ANSWER, call.output_tokens))
            self._engine.add(name, prompts.token_ids(call), answer)

    def _step(self) -> None:
        answers = self._engine.step()
        scheduled = _scheduled(self._engine.report())
        took_s = STEP_S + TOKEN_S * (scheduled - self._scheduled)
        self._scheduled = scheduled
        self._clock.now_s += took_s
        now_s = self._clock()
        if now_s >= self._measured_from_s:
            self._served.steps += 1
            if self._policy.admission.order == "held-prefix-first":
                self._held_first_s += took_s
        for answer in answers:
            one = self._open[answer.request_id]
            counts = one.sent_s >= self._measured_from_s
            if answer.tokens and not one.answered:
                one.answered = True
                if counts:
                    self._served.ttft_s.append(now_s - one.sent_s)
            if answer.finished:
                del self._open[answer.request_id]
                one.client.due_s = now_s + self._rng.expovariate(1 / self._load.think_s)
                self._idle.append(one.client)
                if counts and not answer.failed:
                    self._served.completed += 1
                    self._served.prompt_tokens += one.prompt_tokens
                    self._served.hit_tokens += answer.cached_tokens


ORDERS = {
    "vLLM's order": {"order": "arrival"},
    "as shipped": {},
    "without the share": {"oldest_share": "0%"},
}
"""By name, keys of a policy's `admission` other than ``max_wait``."""
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


def shared_blocks_for(geometry: PoolGeometry, reach_tokens: float) -> tuple[int, int]:
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
    clock = SteppedClock()
    with tempfile.TemporaryDirectory(prefix="hisparsed-oversubscribed-") as name:
        engine = InProcessEngine(node_of(Path(name)), max_multiplier=2.0, clock=clock)
        try:
            geometry = engine.report().geometry
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
    parser = argparse.ArgumentParser(prog="python -m tests.bench.oversubscribed")
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
