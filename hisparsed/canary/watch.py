"""The canary at work: asks when it is due, compares, and acts on a different answer.

Runs alongside the control loop and never holds it up. On a mismatch the levers freeze, an event is
recorded and evidence is written; requests are still served. A suspicion of corruption is reported,
and the canary asks again first. Evidence is a few small files in the state folder, the oldest go
first; they hold no tokens and no request names of users. For one run of the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hisparsed.canary.learning import CanaryMemory
from hisparsed.canary.round import (
    CanaryAnswer,
    CanaryEngine,
    CanaryQuestion,
    CanarySchedule,
    Conditions,
    RoundResult,
    Trigger,
    make_prompt,
    prompt_tokens,
)
from hisparsed.canary.verdict import Finding
from hisparsed.control.events import EventRecorder
from hisparsed.control.holds import Holds
from hisparsed.control.journal.journal import Journal
from hisparsed.control.journal.records import SNAPSHOT_JSON, TickRecord
from hisparsed.control.state_files import save_evidence_file
from hisparsed.control.status.current import TickOutcome
from hisparsed.control.status.document import CanaryRun, CanaryState, CanaryStatus
from hisparsed.engine.port import EngineGone
from hisparsed.policy.events import EventKind
from hisparsed.policy.schema import Canary
from hisparsed.policy.signals import AdmissionOrder, Lever, PoolGeometry
from hisparsed.policy.units import counted

if TYPE_CHECKING:
    pass


FOLDER = "canary"
MOST_FILES = 8
_DECISIONS = 60
"""Decisions of about the last ticks, newest last."""


def evidence_document(
    verdict: RoundResult,
    trigger: str,
    at_unix_s: float,
    last: TickOutcome,
    ticks: Iterable[TickRecord],
    noise: float | None = None,
) -> dict[str, Any]:
    """Everything that is known of a mismatch, as plain JSON values."""
    report = SNAPSHOT_JSON.dump_python(last.record.snapshot, mode="json")
    del report["requests_hot"]
    return {
        "at_unix_s": at_unix_s,
        "trigger": trigger,
        "sentence": verdict.sentence,
        "prompt_tokens": list(verdict.questions[0].prompt),
        "expected": list(verdict.expected),
        "noise": noise,
        "answers": [
            run.model_dump(mode="json")
            | {
                "got": list(answer.tokens),
                "logprobs": [dict(position.logprobs) for position in answer.positions],
            }
            for run, answer in zip(verdict.runs(), verdict.answers, strict=True)
        ],
        "decisions": recent_sentences(ticks),
        "report": report,
    }


def recent_sentences(ticks: Iterable[TickRecord]) -> list[dict[str, Any]]:
    """The latest decisions that act or say something new, newest last, as plain JSON values."""
    sentences = [
        {
            "at_unix_s": tick.at_unix_s,
            "tick": tick.decision.tick,
            "lever": one.lever.value,
            "code": one.reason.value,
            "acts": one.acts,
            "sentence": one.sentence,
        }
        for tick in ticks
        for one in tick.decision.levers
        if one.acts or one.lever in tick.notable
    ]
    return sentences[-_DECISIONS:]


def save_evidence(state_dir: Path, document: dict[str, Any]) -> Path:
    """Write one file, whole or not at all, and drop the oldest beyond ``MOST_FILES``.

    Raises ``OSError``.
    """
    return save_evidence_file(
        state_dir / FOLDER, "mismatch", document["at_unix_s"], document, most=MOST_FILES
    )


log = logging.getLogger("hisparsed.canary")


class CanaryWatch:
    """``clock`` is monotonic seconds, ``wall_clock`` Unix seconds; evidence goes below
    ``state_dir``. Call ``watch`` after each tick."""

    def __init__(
        self,
        engine: CanaryEngine,
        holds: Holds,
        recorder: EventRecorder,
        journal: Journal,
        state_dir: Path,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        exact: bool = False,
    ) -> None:
        self._engine = engine
        self._exact = exact
        self._holds = holds
        self._recorder = recorder
        self._journal = journal
        self._state_dir = state_dir
        self._clock = clock
        self._wall_clock = wall_clock
        self._began_s = clock()
        self._schedule = CanarySchedule()
        self._asking = asyncio.Lock()
        self._round: asyncio.Task[None] | None = None
        self._last: TickOutcome | None = None
        self._memory: CanaryMemory | None = None
        """Of the prompt and answer length that the policy asks for."""
        self._state = CanaryState.WAITING
        self._found = "no round has ended yet"
        self._not_ready = False
        self._runs: list[CanaryRun] = []
        self._last_round: tuple[float, Trigger] | None = None
        self._rounds = self._mismatches = self._suspects = self._failed = 0
        self._tokens, self._step_s = 0, 0.0
        self._evidence: str | None = None

    # --- when -------------------------------------------------------------------------

    def watch(self, outcome: TickOutcome) -> None:
        """Start a round if one is due."""
        self._last = outcome
        settings = outcome.policy.canary
        if not settings.enabled or self._asking.locked():
            return
        trigger = self._schedule.look(
            settings,
            _conditions(outcome, self._clock()),
            again=self._memory is not None and self._memory.wants_more,
        )
        if trigger is not None:
            self._round = asyncio.create_task(self.run(trigger))

    async def run(self, trigger: Trigger, *, actor: str | None = None) -> None:
        """Run one round; a round in progress ends first. ``actor`` is who asked for it.

        Raises ``RuntimeError`` before the first tick.
        """
        async with self._asking:
            last = self._last
            if last is None:
                raise RuntimeError("the engine has not reported yet")
            settings = last.policy.canary
            self._schedule.ran(self._clock())
            try:
                verdict = await self._ask(settings, last.record.snapshot.geometry)
                await self._judge(verdict, trigger, settings, actor)
            except EngineGone:
                return
            except Exception as error:
                self._note_failure(error)

    async def close(self) -> None:
        """Cancel a round in progress."""
        if self._round is not None:
            self._round.cancel()
            await asyncio.gather(self._round, return_exceptions=True)

    # --- asking -----------------------------------------------------------------------

    async def _ask(self, settings: Canary, geometry: PoolGeometry) -> RoundResult:
        prompt = make_prompt(self._engine, prompt_tokens(settings.prefix, geometry))
        memory = self._memory
        if memory is None or (memory.prompt, memory.tokens) != (prompt, settings.tokens):
            memory = CanaryMemory(prompt, settings.tokens, exact=self._exact)
        questions = memory.questions()
        answers = await self._answers(questions)
        self._memory = memory
        learning = memory.baseline is None
        verdict = memory.take(questions, answers)
        if learning and memory.baseline is not None:
            rounds = counted(memory.clean_rounds, "clean round")
            self._recorder.event(
                EventKind.CANARY_RECORDED,
                f"The canary's answer to {len(prompt)} tokens is recorded from {rounds}: "
                f"{verdict.sentence}.",
            )
        return verdict

    async def _answers(self, questions: tuple[CanaryQuestion, ...]) -> tuple[CanaryAnswer, ...]:
        answers = []
        for question in questions:
            answer = await self._engine.ask(question)
            self._tokens += answer.seen.scheduled_tokens
            self._step_s += answer.seen.step_s
            answers.append(answer)
        return tuple(answers)

    # --- judging ----------------------------------------------------------------------

    def _note_failure(self, error: Exception) -> None:
        self._failed += 1
        words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if self._state is not CanaryState.MISMATCH:
            self._state = CanaryState.FAILED
            self._found = f"the last round did not end ({words})"
        self._recorder.event(
            EventKind.CANARY_FAILED, f"The canary got no answer ({words}); it tries again later."
        )

    async def _judge(
        self, verdict: RoundResult, trigger: Trigger, settings: Canary, actor: str | None
    ) -> None:
        self._rounds += 1
        self._runs = verdict.runs()
        self._last_round = self._wall_clock(), trigger
        if verdict.finding is Finding.CORRUPT:
            await self._alarm(verdict, trigger, settings)
        elif verdict.finding is Finding.SUSPECT:
            self._suspect(verdict)
        elif self._state is not CanaryState.MISMATCH:
            learning = self._memory is None or self._memory.baseline is None
            self._state = CanaryState.LEARNING if learning else CanaryState.OK
            self._found = verdict.sentence
        elif actor is not None:
            self._state, self._found = CanaryState.OK, verdict.sentence
            self._not_ready = False
            self._recorder.event(
                EventKind.CANARY_CLEARED,
                f"{actor} ran the canary again: {verdict.sentence}. Frozen levers stay frozen "
                "until they are thawed.",
                actor=actor,
            )

    def _suspect(self, verdict: RoundResult) -> None:
        self._suspects += 1
        if self._state is not CanaryState.MISMATCH:
            self._state, self._found = CanaryState.SUSPECT, verdict.sentence
        known = self._memory is not None and self._memory.baseline is not None
        why = (
            "further from the baseline than rounding usually is"
            if known
            else "too different to learn from"
        )
        self._recorder.event(
            EventKind.CANARY_SUSPECT,
            f"Answers of the canary are {why}: {verdict.sentence}. The canary asks again soon; "
            f"nothing is frozen.",
        )

    async def _alarm(self, verdict: RoundResult, trigger: Trigger, settings: Canary) -> None:
        self._mismatches += 1
        self._state, self._found = CanaryState.MISMATCH, verdict.sentence
        self._not_ready = settings.on_mismatch == "freeze-and-not-ready"
        self._holds.freeze(Lever)
        kept = await self._keep(verdict, trigger)
        ready = " The node answers not ready." if self._not_ready else ""
        self._recorder.event(
            EventKind.CANARY_MISMATCH,
            f"The canary got a different answer than at start: {verdict.sentence}. Answers to "
            f"users may be wrong too. Every lever is frozen.{ready} {kept}",
        )

    async def _keep(self, verdict: RoundResult, trigger: Trigger) -> str:
        last = self._last
        if last is None:
            return "There was no report to keep."
        document = evidence_document(
            verdict,
            trigger,
            self._wall_clock(),
            last,
            self._journal.ticks,
            noise=self._noise(),
        )
        try:
            path = await asyncio.to_thread(save_evidence, self._state_dir, document)
        except Exception as error:
            # The mismatch must be reported whatever the error is.
            why = getattr(error, "strerror", None) or error
            return f"The evidence could not be written: {why}."
        self._evidence = str(path)
        return f"Evidence: {path}."

    # --- reporting ----------------------------------------------------------------------

    def status(self) -> CanaryStatus:
        """The state now."""
        settings = None if self._last is None else self._last.policy.canary
        state = self._state
        if state is not CanaryState.MISMATCH and settings is not None and not settings.enabled:
            state = CanaryState.OFF
        at_unix_s, trigger = self._last_round or (None, None)
        life_s = self._clock() - self._began_s
        share = self._step_s / life_s if life_s > 0 else 0.0
        memory = self._memory if self._memory is not None and self._memory.baseline else None
        return CanaryStatus(
            state=state,
            sentence=(
                f"{self._found}; {counted(self._rounds, 'round')}, "
                f"{self._mismatches} with a difference, {self._suspects} suspect, "
                f"{self._failed} failed, "
                f"{self._schedule.left_out} skipped, {share:.2%} of the time"
            ),
            not_ready=self._not_ready,
            running=self._asking.locked(),
            rounds_total=self._rounds,
            mismatches_total=self._mismatches,
            failed_total=self._failed,
            left_out_total=self._schedule.left_out,
            last_unix_s=at_unix_s,
            last_trigger=trigger,
            noise=self._noise(),
            suspects_total=self._suspects,
            prompt_tokens=0 if memory is None else len(memory.prompt),
            answer_tokens=0 if memory is None else memory.tokens,
            scheduled_tokens_total=self._tokens,
            step_seconds_total=self._step_s,
            share_of_time=share,
            last_round=self._runs,
            evidence=self._evidence,
        )

    def _noise(self) -> float | None:
        known = None if self._memory is None else self._memory.baseline
        return None if known is None else known.noise


def _conditions(outcome: TickOutcome, now_s: float) -> Conditions:
    snapshot = outcome.record.snapshot
    ordered = snapshot.admission.order is AdmissionOrder.HELD_PREFIX_FIRST
    return Conditions(
        now_s=now_s,
        waiting=snapshot.requests.waiting,
        coverage_low=ordered and outcome.policy.admission.order == "auto",
        offload_target_blocks=snapshot.offload.target_blocks,
        budget_blocks=snapshot.geometry.budget_blocks,
        moving=bool(snapshot.pending_blocks or snapshot.draining_blocks),
    )
