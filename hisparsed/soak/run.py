"""The soak on engines in this process: calls in, moves between steps, checks, proofs, record.

One thread: whatever happens is between two steps, so a seed and a step name a moment. Engines and
the machine's clock are passed in. A soak that is not clean leaves a record: seed, settings, every
move, and what was wrong. The same seed and settings give the same calls and moves at the same
steps.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from pydantic_core import to_json

from hisparsed.engine.messages import command_to_wire
from hisparsed.policy.decisions import EngineCommand
from hisparsed.policy.signals import EngineReport
from hisparsed.soak.engine import (
    AnswerSoFar,
    Engine,
    InProcessEngine,
    Oracle,
    SampledAnswer,
    SteppedClock,
    WrongAnswer,
)
from hisparsed.soak.result import SoakResult, SoakTotals, silent
from hisparsed.soak.settings import MAX_MULTIPLIER, STEP_S, SoakSettings, node_config, oracle_config
from hisparsed.soak.workload import Move, Moves, Reset, SoakCall, SoakTraffic

_REPORT_STEPS = 8
_MOVES_A_CHECK = 3
_SETTLE_STEPS = 200
"""Steps that transfers get to end after the last call."""
_ENOUGH_WRONG = 20
"""Wrong or stuck calls after which a soak shows nothing new."""


@dataclass(slots=True)
class _Open:
    call: SoakCall
    progress_s: float
    tokens: tuple[int, ...] = ()
    token_busy_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoggedMove:
    """A move and the step before which it was made; ``refused`` says why it was not."""

    step: int
    kind: str
    payload: dict[str, Any]
    refused: str | None = None


@dataclass
class Soak:
    """One soak. ``run`` it, then read ``tally``, ``differences``, ``moves_made``.

    ``time_s`` is the machine's clock; ``busy_s`` counts the time that this thread worked, which
    other processes of the machine do not lengthen. ``stop`` ends the sending of calls early.
    """

    settings: SoakSettings
    engine: Engine
    clock: SteppedClock
    oracle: Oracle
    traffic: SoakTraffic
    time_s: Callable[[], float]
    busy_s: Callable[[], float]
    on_progress: Callable[[SoakTotals], None] = silent
    tally: SoakTotals = field(default_factory=SoakTotals)
    differences: list[WrongAnswer] = field(default_factory=list)
    moves_made: list[LoggedMove] = field(default_factory=list)
    stop: bool = False

    def __post_init__(self) -> None:
        report = self.engine.report()
        self._moves = Moves(self.settings.seed, report)
        # Scratch blocks, for one, are taken permanently before the first call.
        self._idle_gpu_blocks = report.gpu.free_blocks
        self._sampling = Random(f"{self.settings.seed} samples")
        self._open: dict[str, _Open] = {}
        self._began_s = self.time_s()
        self._first_s = self.clock.now_s
        self._next_move_s = self.clock.now_s
        self._progress_s = self.clock.now_s
        self._dead = False

    @property
    def clean(self) -> bool:
        tally = self.tally
        return not (self.differences or tally.violations or tally.stuck)

    def run(self) -> None:
        """Until the end that the settings name, then until every call has ended.

        Stops at once when the engine makes no progress any more or the ledger is broken.
        """
        while not self._dead and not self._over():
            self._send()
            self._cancel()
            if self._moving() and self.clock.now_s >= self._next_move_s:
                self._move(self._moves.next(self.tally.last))
                self._next_move_s = self.clock.now_s + self._moves.pause_s(
                    self.settings.moves_every_s
                )
            self._step()
        if self._open and not self._dead:
            # The last random limit may be one call at a time.
            self._apply(EngineCommand(admission=self._moves.no_limits()))
        while self._open and not self._dead:
            self._step()
        self._settle()

    # --- parts of a step ------------------------------------------------------------

    def _over(self) -> bool:
        settings, tally = self.settings, self.tally
        if self.stop:
            return True
        if settings.for_s is not None and self.time_s() - self._began_s >= settings.for_s:
            return True
        if settings.max_steps is not None and tally.steps >= settings.max_steps:
            return True
        return settings.max_moves is not None and tally.moves >= settings.max_moves

    def _moving(self) -> bool:
        passed_s = (self.clock.now_s - self._first_s) % self.settings.quiet_every_s
        return passed_s < self.settings.quiet_every_s - self.settings.quiet_s

    def _send(self) -> None:
        for call in self.traffic.due(self.clock.now_s):
            self._open[call.request_id] = _Open(call, self.clock.now_s)
            self.engine.add(call.request_id, call.prompt, call.max_tokens)

    def _cancel(self) -> None:
        for request_id in self.traffic.to_cancel(self.clock.now_s):
            cut = self._open.pop(request_id)
            self.engine.abort(request_id)
            self._sample(cut)
            self.traffic.cancelled(cut.call, self.clock.now_s)

    def _move(self, move: Move) -> None:
        began_s = self.busy_s()
        refused = None
        if isinstance(move, Reset):
            kind, payload = "reset", {"running": move.running, "connector": move.connector}
            self.tally.resets += 1
            if not self.engine.reset_caches(**payload):
                refused = "vLLM could not reset"
                self.tally.resets_refused += 1
        else:
            kind, payload = "apply", command_to_wire(move)
            refused = self._apply(move)
        took_s = self.busy_s() - began_s
        self.tally.busy_s += took_s
        if kind == "apply":
            self.tally.move_us.append(took_s * 1e6)
        self.tally.moves += 1
        self.moves_made.append(LoggedMove(self.tally.steps, kind, payload, refused))
        self._report()
        if self.tally.moves % _MOVES_A_CHECK == 0:
            self._check()

    def _apply(self, command: EngineCommand) -> str | None:
        try:
            self.engine.apply(command)
        except ValueError as error:
            self.tally.moves_refused += 1
            return str(error)
        return None

    def _check(self) -> None:
        if not self._dead:
            self._violated(self.engine.check())

    def _violated(self, found: list[str]) -> None:
        self.tally.violations.extend(f"step {self.tally.steps}: {one}" for one in found)
        self._dead = self._dead or bool(found)

    def _step(self) -> None:
        tally, moving = self.tally, self._moving()
        began_s = self.busy_s()
        answers = self.engine.step()
        tally.busy_s += self.busy_s() - began_s
        tally.steps += 1
        self.clock.now_s = self._first_s + tally.steps * STEP_S
        for answer in answers:
            self._answered(answer, moving)
        if tally.steps % _REPORT_STEPS == 0:
            self._report()
        self._look_for_stuck()

    def _report(self) -> None:
        began_s = self.busy_s()
        report = self.engine.report()
        took_s = self.busy_s() - began_s
        before = self.tally.last
        self.tally.busy_s += took_s
        self.tally.take(report, took_s * 1e6)
        if not self._dead:
            # The engine's own watch looks at the counters and a few blocks in each report.
            self._violated([f"{one.rule}: {one.sentence}" for one in report.ledger.violations])
        if before is None or _scheduled(report) > _scheduled(before):
            self._progress_s = self.clock.now_s
        self.on_progress(self.tally)

    def _answered(self, answer: AnswerSoFar, moving: bool) -> None:
        one = self._open.get(answer.request_id)
        if one is None:
            return
        new = len(answer.tokens) - len(one.tokens)
        if new > 0:
            self._note_gap(one, moving)
            one.tokens = tuple(answer.tokens)
            one.progress_s = self.clock.now_s
        if not answer.finished:
            return
        del self._open[answer.request_id]
        self._sample(one)
        if answer.failed or len(one.tokens) != one.call.max_tokens:
            self.tally.stuck += 1
        else:
            self.tally.requests += 1
            self.tally.prefix_hit_tokens += answer.cached_tokens
        self.traffic.answered(one.call, self.clock.now_s)

    def _note_gap(self, one: _Open, moving: bool) -> None:
        busy_s = self.tally.busy_s
        if one.token_busy_s is not None:
            gaps = self.tally.gaps_moving_s if moving else self.tally.gaps_quiet_s
            gaps.append(busy_s - one.token_busy_s)
        one.token_busy_s = busy_s

    def _sample(self, one: _Open) -> None:
        if not one.tokens or self._sampling.random() >= self.settings.sample_share:
            return
        sample = SampledAnswer(one.call.request_id, self.tally.steps, one.call.prompt, one.tokens)
        self._differ(self.oracle.take(sample))

    def _differ(self, found: list[WrongAnswer]) -> None:
        self.differences.extend(found)
        self.tally.token_differences += len(found)

    # --- ends -------------------------------------------------------------------------

    def _look_for_stuck(self) -> None:
        """An engine that does nothing though calls are open, or a call that waits too long."""
        now_s, limit_s = self.clock.now_s, self.settings.stuck_after_s
        if not self._open:
            self._progress_s = now_s
        elif now_s - self._progress_s > limit_s:
            self.tally.stuck += len(self._open)
            self._dead = True
            return
        late = [name for name, one in self._open.items() if now_s - one.progress_s > limit_s]
        for name in late:
            one = self._open.pop(name)
            self.engine.abort(name)
            self.tally.stuck += 1
            self.traffic.answered(one.call, now_s)
        if self.tally.stuck + self.tally.token_differences > _ENOUGH_WRONG:
            self._dead = True

    def _settle(self) -> None:
        """Prove what is left, and that calls which have ended hold nothing."""
        self._differ(self.oracle.settle())
        for _ in range(_SETTLE_STEPS if not self._dead else 0):
            if not self._leaks():
                break
            self._step()
        else:
            self.tally.violations.extend(self._leaks())
        self._report()
        self._check()

    def _leaks(self) -> list[str]:
        if self._dead:
            return []
        report = self.engine.report()
        found = {
            "host blocks in use": report.hisparse.in_use_blocks,
            "GPU blocks in use": self._idle_gpu_blocks - report.gpu.free_blocks,
            "hot blocks leased": report.hot.leased_blocks,
            "offload transfers in flight": report.offload.in_use_chunks,
        }
        return [f"after the last call: {count} {what}" for what, count in found.items() if count]


def save_record(soak: Soak, folder: Path | None = None) -> Path:
    """Write the record of ``soak``; returns where it is."""
    return save_document(
        {
            "settings": soak.settings,
            "steps": soak.tally.steps,
            "violations": soak.tally.violations,
            "stuck": soak.tally.stuck,
            "differences": soak.differences,
            "moves": soak.moves_made,
            "report": soak.tally.last,
        },
        folder,
    )


def save_document(document: Mapping[str, object], folder: Path | None = None) -> Path:
    """Write JSON into ``folder`` (the system's for temporary files if not given)."""
    handle, name = tempfile.mkstemp(prefix="hisparsed-soak-", suffix=".json", dir=folder)
    with os.fdopen(handle, "wb") as file:
        file.write(to_json(document, indent=1))
    return Path(name)


@contextmanager
def soak_on_engines(
    settings: SoakSettings, on_progress: Callable[[SoakTotals], None] = silent
) -> Iterator[Soak]:
    """A soak that is ready to run, with both of its engines started (some seconds)."""
    clock = SteppedClock()
    with tempfile.TemporaryDirectory(prefix="hisparsed-soak-") as name:
        node = node_config(settings, Path(name) / "node")
        oracle = oracle_config(settings, Path(name) / "oracle")
        engine = InProcessEngine(node, max_multiplier=MAX_MULTIPLIER, clock=clock)
        try:
            witness = InProcessEngine(oracle, max_multiplier=MAX_MULTIPLIER, clock=SteppedClock())
            try:
                traffic = SoakTraffic(
                    settings.trace,
                    seed=settings.seed,
                    clients=settings.clients,
                    cancel_share=settings.cancel_share,
                    max_model_len=node.reference.max_model_len,
                )
                yield Soak(
                    settings,
                    engine,
                    clock,
                    Oracle(witness),
                    traffic,
                    time.perf_counter,
                    time.thread_time,
                    on_progress=on_progress,
                )
            finally:
                witness.close()
        finally:
            engine.close()


def run_soak(
    settings: SoakSettings,
    on_progress: Callable[[SoakTotals], None] = silent,
    *,
    record_folder: Path | None = None,
) -> SoakResult:
    """Run one soak. Ctrl-C ends it early, with the result so far.

    A soak that is not clean leaves a record in ``record_folder``; so does one that an
    exception of the engine ends, which is raised on with the place of the record.
    """
    with soak_on_engines(settings, on_progress) as soak, _stopped_by_interrupt(soak):
        began_s = time.perf_counter()
        try:
            soak.run()
        except Exception as error:
            error.add_note(f"The record of this soak is in {save_record(soak, record_folder)}.")
            raise
        seconds = time.perf_counter() - began_s
        record = None if soak.clean else str(save_record(soak, record_folder))
        return soak.tally.result(
            settings,
            seconds=seconds,
            verified=soak.oracle.verified,
            cancels=soak.traffic.cancels,
            reconnects=soak.traffic.reconnects,
            interrupted=soak.stop,
            record=record,
        )


@contextmanager
def _stopped_by_interrupt(soak: Soak) -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        soak.stop = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _scheduled(report: EngineReport) -> int:
    return report.progress.scheduled_tokens_total if report.progress is not None else 0
