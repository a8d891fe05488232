"""Reference engines in this process, and the oracle that verifies answers with one of them.

The same vLLM engine, scheduler, connectors and executor as in the daemon, driven step by step on a
virtual clock: no engine-core child, no API server, no threads. An untouched engine with room for
everything must give the same tokens, since a token depends only on the tokens before it. Answers
are verified in batches, between the steps of the engine under test.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from hisparsed.config.node import NodeConfig
from hisparsed.engine.messages import ApplyResult, command_to_wire, report_from_wire
from hisparsed.engine.plugin import LAUNCHED_ENV, control
from hisparsed.policy.decisions import EngineCommand
from hisparsed.policy.signals import EngineReport


@dataclass(frozen=True, slots=True)
class AnswerSoFar:
    """How far a call has come: all its tokens so far; ``failed`` ended without an answer.

    ``cached_tokens`` of its prompt were a prefix hit.
    """

    request_id: str
    tokens: Sequence[int]
    finished: bool
    failed: bool = False
    cached_tokens: int = 0


class Engine(Protocol):
    """The engine interface that a soak drives."""

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[AnswerSoFar]: ...
    def apply(self, command: EngineCommand) -> ApplyResult: ...
    def report(self) -> EngineReport: ...
    def check(self) -> list[str]: ...
    def reset_caches(self, *, running: bool, connector: bool) -> bool: ...


class SteppedClock:
    """Seconds that advance only on request."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class InProcessEngine:
    """Implements ``Engine``. ``close`` it; two may live at once."""

    def __init__(self, config: NodeConfig, *, max_multiplier: float, clock: SteppedClock) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ[LAUNCHED_ENV] = "1"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm.v1.engine.llm_engine import LLMEngine

        from hisparsed.engine.reference.launch import vllm_config as reference_vllm_config

        self._clock = clock
        self._llm = LLMEngine.from_vllm_config(
            reference_vllm_config(config, max_multiplier=max_multiplier)
        )
        self.core: Any = self._llm.engine_core.engine_core
        scheduler = self.core.scheduler
        scheduler.clock_s = scheduler.wall_clock_s = clock

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> None:
        """Send a greedy call of exactly ``max_tokens`` tokens."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._llm.add_request(
            request_id, {"prompt_token_ids": list(prompt)}, params, arrival_time=self._clock()
        )

    def abort(self, request_id: str) -> None:
        self._llm.abort_request([request_id])

    def step(self) -> list[AnswerSoFar]:
        """One engine step; the calls that it brought forward."""
        return [_answer(output) for output in self._llm.step()]

    def apply(self, command: EngineCommand) -> ApplyResult:
        payload = command_to_wire(command)
        return ApplyResult.model_validate(control(self.core, "apply", payload))

    def report(self) -> EngineReport:
        return report_from_wire(control(self.core, "report", {}))

    def check(self) -> list[str]:
        """Every broken invariant of the host ledger, in a sentence; looks at every block."""
        watch = self.core.scheduler.hisparsed.host.watch
        return [f"{one.rule}: {one.sentence}" for one in watch.look_at_everything()]

    def reset_caches(self, *, running: bool, connector: bool) -> bool:
        """Forget all prefixes; whether vLLM could. ``running`` preempts what runs."""
        try:
            return bool(
                self._llm.reset_prefix_cache(
                    reset_running_requests=running, reset_connector=connector
                )
            )
        except RuntimeError as error:
            # vLLM refuses while a call waits for a load; what ran is preempted anyway.
            if "Failed to reset KV cache" not in str(error):
                raise
            return False

    def close(self) -> None:
        self._llm.engine_core.shutdown()


def _answer(output: Any) -> AnswerSoFar:
    first = output.outputs[0]
    failed = output.finished and first.finish_reason not in ("length", "stop")
    return AnswerSoFar(
        output.request_id,
        first.token_ids,
        bool(output.finished),
        bool(failed),
        int(output.num_cached_tokens or 0),
    )


_BATCH = 24
_KNOWN = 4000
"""Answers that are kept, because clients send the same prompts again."""


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """An answer as the engine under test gave it, whole or cut; ``step`` is when it ended."""

    request_id: str
    step: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WrongAnswer:
    """``sample`` differs from ``expected`` from token ``at`` on."""

    sample: SampledAnswer
    expected: tuple[int, ...]
    at: int


class Oracle:
    """``engine`` must be of the same model. ``verified`` counts answers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: list[SampledAnswer] = []
        self._known: dict[bytes, tuple[int, ...]] = {}
        self.verified = 0

    def take(self, sample: SampledAnswer) -> list[WrongAnswer]:
        """Verify at some time; the differences of a batch when one was due."""
        self._waiting.append(sample)
        return self.settle() if len(self._waiting) >= _BATCH else []

    def settle(self) -> list[WrongAnswer]:
        """Verify all that were taken."""
        samples, self._waiting = self._waiting, []
        self._ask([one for one in samples if len(self._answer(one)) < len(one.tokens)])
        found = []
        for sample in samples:
            self.verified += 1
            expected = self._answer(sample)[: len(sample.tokens)]
            if expected != sample.tokens:
                found.append(WrongAnswer(sample, expected, _first_unequal(expected, sample.tokens)))
        while len(self._known) > _KNOWN:
            del self._known[next(iter(self._known))]
        return found

    def _answer(self, sample: SampledAnswer) -> tuple[int, ...]:
        return self._known.get(_key(sample.prompt), ())

    def _ask(self, samples: Sequence[SampledAnswer]) -> None:
        wanted: dict[tuple[int, ...], int] = {}
        for sample in samples:
            wanted[sample.prompt] = max(len(sample.tokens), wanted.get(sample.prompt, 0))
        asked = {f"oracle-{index}": prompt for index, prompt in enumerate(wanted)}
        for request_id, prompt in asked.items():
            self._engine.add(request_id, prompt, wanted[prompt])
        while asked:
            for answer in self._engine.step():
                if answer.finished:
                    self._known[_key(asked.pop(answer.request_id))] = tuple(answer.tokens)


def _key(prompt: tuple[int, ...]) -> bytes:
    return blake2b(repr(prompt).encode(), digest_size=16).digest()


def _first_unequal(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))
