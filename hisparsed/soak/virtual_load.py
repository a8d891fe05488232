"""Sessions of a recorded trace against an engine in virtual time, under a policy's admission.

A step costs a fixed time and a time a token, so results depend on what the engine does and not
on this machine. Closed loop: a client sends its next call some time after its last answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random

from hisparsed.control.engine_port import ServingCounters
from hisparsed.control.observe import command_for, observe
from hisparsed.engine.messages import EngineReport
from hisparsed.policy.admission import start_admission
from hisparsed.policy.decide import decide
from hisparsed.policy.memory import Memory
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Admission
from hisparsed.replay.prompt import PromptMaker, TokenRange
from hisparsed.replay.scale import ScaledCall, ScaledTrace
from hisparsed.soak.engine import Engine, VirtualClock

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


class PolicyAtWork:
    """Observes the engine and lets the policy decide, as the control loop does each tick."""

    def __init__(self, policy: Policy, engine: Engine, report: EngineReport) -> None:
        self._policy = policy
        self._engine = engine
        self._memory = Memory()
        self._tick = 0
        self.admission: Admission = start_admission(policy, report.geometry.max_num_seqs)
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
        command = command_for(decision.commands)
        if command is None:
            return
        self._engine.apply(command)
        if decision.commands.admission is not None:
            self.order_changes += decision.commands.admission.order is not self.admission.order
            self.admission = decision.commands.admission


def sessions_of(
    trace: ScaledTrace, seed: int, client: int, clients: int
) -> Iterator[tuple[PromptMaker, ScaledCall]]:
    """The endless calls of one client: shuffled sessions dealt out, the first one joined midway.

    Each lap over the trace has prompts of its own.
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
    clock: VirtualClock,
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
        clock: VirtualClock,
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
        self._scheduled = report.scheduled_tokens
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
        scheduled = self._engine.report().scheduled_tokens
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
