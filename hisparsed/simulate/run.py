"""One policy on one workload on one simulated node: starts it, drives it, measures it.

One loop over virtual time. Nothing sleeps: a step takes as long as it costs, and while nothing can
be computed time moves to the next event. ``Scenario``, ``PolicyChoice`` and the seed decide the
outcome. Imports vLLM, which takes seconds; a module that only reads options does not need this one.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hisparsed.control.status.current import TickOutcome
from hisparsed.engine.simulated.node import SimulatedCall, SimulatedNode
from hisparsed.engine.simulated.vllm_config import SimulatedOptions
from hisparsed.errors import UserError
from hisparsed.policy.decisions import EngineCommand
from hisparsed.policy.signals import Lever
from hisparsed.simulate.control import (
    Arrival,
    ControlSide,
    LoopControl,
    SimulatedAdmission,
    StaticControl,
)
from hisparsed.simulate.policies import PolicyChoice
from hisparsed.simulate.results import BareSample, CallTimes, Measures, sample_of
from hisparsed.simulate.sampling import players_of
from hisparsed.simulate.scenario import Scenario
from hisparsed.simulate.sizes import fitting_sizes
from hisparsed.simulate.workload import PlannedCall, Play, Players

SAMPLE_S = 1.0
STUCK_STEP_S = 0.05
"""How far time goes when requests wait, nothing moves and nothing else is due."""


@dataclass(slots=True, eq=False)
class _Playing:
    play: Play
    number: int
    call: PlannedCall
    times: CallTimes | None = None
    """Of its call, from the first time that the client sent it until the engine has it."""


class Driver:
    """One run. ``progress`` gets virtual seconds done."""

    def __init__(
        self,
        node: SimulatedNode,
        control: ControlSide,
        players: Players,
        measures: Measures,
        *,
        think_scale: float = 1.0,
        progress: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        self._node = node
        self._control = control
        self._players = players
        self._measures = measures
        self._think_scale = think_scale
        self._progress = progress
        self._due: list[tuple[float, int, _Playing]] = []
        self._order = 0
        self._open: dict[str, tuple[_Playing, CallTimes]] = {}
        self._admission: SimulatedAdmission[_Playing] = SimulatedAdmission()

    def run(self) -> Measures:
        """Until the measures' end; returns them filled."""
        node, clock, measures = self._node, self._node.clock, self._measures
        self._control.start()
        for play in self._players.first():
            self._begin(play)
        next_tick_s, next_sample_s = self._control.tick_s, SAMPLE_S
        before: tuple[int, int] | None = None
        while clock.now_s() < measures.until_s:
            now_s = clock.now_s()
            if before is None and now_s >= measures.from_s:
                before = node.tally.preemptions, node.tally.steps
            while self._due and self._due[0][0] <= now_s:
                at_s, _, playing = heapq.heappop(self._due)
                self._arrive(playing, at_s)
            self._let_in(now_s)
            if now_s >= next_tick_s:
                self._control.tick()
                next_tick_s = max(next_tick_s + self._control.tick_s, now_s)
            if now_s >= next_sample_s:
                self._sample()
                next_sample_s = max(next_sample_s + SAMPLE_S, now_s)
            upcoming_s = min(next_tick_s, next_sample_s, measures.until_s)
            if self._due:
                upcoming_s = min(upcoming_s, self._due[0][0])
            if not node.busy:
                clock.advance_to(upcoming_s)
                continue
            self._step(upcoming_s)
        preemptions, steps = before or (node.tally.preemptions, node.tally.steps)
        measures.preemptions = node.tally.preemptions - preemptions
        measures.steps = node.tally.steps - steps
        return measures

    def _step(self, upcoming_s: float) -> None:
        clock = self._node.clock
        emitted, executed = self._node.step()
        for one in emitted:
            playing, times = self._open[one.request_id]
            if one.cached_tokens is not None:
                times.cached_tokens = one.cached_tokens
            if one.tokens and times.first_token_s is None:
                times.first_token_s = clock.now_s()
            if one.finished:
                times.finished_s = clock.now_s()
                times.failed = one.failed
                del self._open[one.request_id]
                self._admission.finished(playing)
                self._next_call(playing)
        if executed or not self._node.busy:
            return
        copy_s = self._node.next_copy_done_s()
        if copy_s is None:
            # A copy that has just ended is acknowledged with the next step, at the same time.
            clock.advance_to(min(upcoming_s, clock.now_s() + STUCK_STEP_S))
        else:
            clock.advance_to(min(upcoming_s, copy_s))

    # --- sessions -----------------------------------------------------------------------

    def _begin(self, play: Play) -> None:
        self._at(play.start_s, _Playing(play, play.first_call, next(play.calls)))

    def _next_call(self, playing: _Playing) -> None:
        now_s, play = self._node.clock.now_s(), playing.play
        call = next(play.calls, None)
        if call is not None:
            playing.call = call
            playing.number += 1
            at_s = now_s + call.think_s * self._think_scale
            if at_s < play.until_s:
                self._at(at_s, playing)
            return
        self._next_play(play, now_s)

    def _next_play(self, play: Play, now_s: float) -> None:
        following = self._players.following(play, now_s)
        if following is not None:
            self._begin(following)

    def _at(self, at_s: float, playing: _Playing) -> None:
        self._order += 1
        heapq.heappush(self._due, (at_s, self._order, playing))

    def _arrive(self, playing: _Playing, at_s: float) -> None:
        """``at_s`` is when the client sent it; steps take time, so that may be a little ago."""
        call, now_s = playing.call, self._node.clock.now_s()
        arrival = self._admission.arrive(
            playing,
            tokens=call.input_tokens + call.output_tokens,
            new_session=playing.number == playing.play.first_call,
            admission=self._control.admission,
            waiting=self._node.counts()[1],
            now_s=now_s,
        )
        if arrival is Arrival.TOO_LONG:
            # A client cannot continue with a session whose next call is too long.
            self._measures.count_refusal(now_s)
            self._next_play(playing.play, now_s)
            return
        times = playing.times
        if times is None:
            times = CallTimes(
                playing.play.name, playing.number, call.input_tokens, call.output_tokens, at_s
            )
            playing.times = times
            self._measures.calls.append(times)
        if arrival is Arrival.SEND:
            self._send(playing, times)
        elif arrival is Arrival.REFUSED:
            self._refuse(playing)

    def _let_in(self, now_s: float) -> None:
        due = self._admission.due(self._control.admission, self._node.counts()[1], now_s)
        for playing in due.send:
            if playing.times is not None:
                self._send(playing, playing.times)
        for playing in due.refused:
            self._refuse(playing)

    def _refuse(self, playing: _Playing) -> None:
        """As a client does that got 429 with Retry-After."""
        admission, now_s = self._control.admission, self._node.clock.now_s()
        self._measures.count_refusal(now_s)
        after_s = 0.0 if admission is None else admission.retry_after_s
        self._at(now_s + after_s, playing)

    def _send(self, playing: _Playing, times: CallTimes) -> None:
        call, playing.times = playing.call, None
        request_id = f"{playing.play.name}.{playing.number}"
        self._open[request_id] = (playing, times)
        self._node.add(
            SimulatedCall(request_id, call.blocks, call.input_tokens, call.output_tokens)
        )

    def _sample(self) -> None:
        node, now_s = self._node, self._node.clock.now_s()
        self._progress(now_s)
        serving = node.serving()
        tokens = (serving.prefix_hit_tokens, serving.prompt_tokens, serving.generated_tokens)
        link_bytes = node.tally.gather_bytes + node.copied_bytes()
        report = node.take_report() if node.hisparse else None
        counts, free = node.counts(), node.gpu_free_blocks()
        bare = BareSample(now_s, *counts, free, *tokens, link_bytes, node.tally.core_s)
        self._measures.samples.append(sample_of(bare, report))


def run_policy(
    scenario: Scenario,
    policy: PolicyChoice,
    seed: int,
    *,
    work_folder: Path,
    journal_folder: Path | None = None,
    progress: Callable[[float], None] = lambda _seconds: None,
) -> Measures:
    """Simulate; ``work_folder`` takes files that vLLM and the policy are read from.

    Raises ``UserError`` where the sizes do not fit, ``ConfigError`` for a wrong policy.
    """
    sizes, command = fitting_sizes(scenario, policy), None
    if sizes.lent_blocks is not None:
        command = EngineCommand(offload_target_blocks=sizes.lent_blocks)
    described = scenario.node
    if policy.store.prefill_reads is not None:
        speed = described.speed.model_copy(update={"prefill_reads": policy.store.prefill_reads})
        described = described.model_copy(update={"speed": speed})
    options = SimulatedOptions(
        node=described,
        model_folder=work_folder / "model",
        host_budget_bytes=sizes.host_budget,
        max_lease_rows=sizes.lease_rows,
        max_model_len=sizes.max_model_len,
        scale=scenario.scale,
        offload_prompt_only=scenario.offload_prompt_only or policy.store.prompt_only,
        eviction=policy.store.eviction,
        store_threshold=policy.store.threshold,
        # The cost of stock vLLM's copies is part of its sizes.
        copies=1 if policy.text is None else policy.store.copies or 1,
        hisparse=policy.hisparse,
        scratch=policy.text is not None,
        seed=seed,
    )
    try:
        node = SimulatedNode(options)
    except ValueError as error:
        raise UserError(f"--policy {policy.name}: vLLM cannot start this node: {error}") from error
    measures = Measures(scenario.warmup_s, scenario.duration_s)
    control: ControlSide
    if sizes.policy_text is None:
        control = StaticControl(node, command)
    else:
        path = work_folder / "policy.yaml"
        path.write_text(sizes.policy_text)
        control = LoopControl(
            node,
            path,
            run=f"{policy.name}-{seed}",
            title=scenario.node.title,
            journal_folder=journal_folder,
            watch=_watch(measures),
        )
    try:
        driver = Driver(
            node,
            control,
            players_of(scenario, seed),
            measures,
            think_scale=scenario.think_scale,
            progress=progress,
        )
        driver.run()
    except UserError as error:
        # The path of the policy does not matter: it was read from an option.
        text = str(error).replace(str(work_folder / "policy.yaml"), "the policy")
        raise UserError(f"--policy {policy.name}: {text}") from error
    finally:
        control.close()
        node.shutdown()
        # vLLM freezes the heap at start; the next run's would come on top of this one's.
        gc.unfreeze()
    measures.journal_lost = control.journal_lost
    return measures


def _watch(measures: Measures) -> Callable[[TickOutcome], None]:
    def look(outcome: TickOutcome) -> None:
        levers = outcome.record.decision.levers
        acting = [one for one in levers if one.acts]
        measures.judged += [
            (one.lever, one.outcome.errors) for one in levers if one.outcome is not None
        ]
        moving = [one for one in acting if one.lever in (Lever.SPLIT, Lever.MULTIPLIER)]
        measures.count_moves(outcome.record.snapshot.at_s, len(moving))
        for one in acting:
            measures.sentences.append((outcome.record.snapshot.at_s, one.sentence))

    return look
