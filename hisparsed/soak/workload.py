"""Random calls and random moves, seeded: what a soak sends, cuts and asks of the engine.

Calls come from a recorded trace, with bursts, cancels and reconnects; a reconnect sends the same
prompt again, as an agent does after a broken connection. A move is an engine command for any
combination of levers, or a reset of the prefix caches. The engine bounds what it is asked for, so
targets beyond floors and budgets are drawn too. Pure; knows no engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from hisparsed.policy.decisions import EngineCommand
from hisparsed.policy.signals import AdmissionOrder, AdmissionRules, EngineReport
from hisparsed.replay.scaled_trace import (
    PromptMaker,
    ScaledCall,
    ScaledTrace,
    TokenRange,
    scale_trace,
)
from hisparsed.replay.trace import load_trace

_SCALE = Fraction(1, 64)
_ANSWER_SCALE = 8
"""Answers are scaled by an eighth only, or at 1/64 rarely anything would decode."""
_MIN_ANSWER, _MAX_ANSWER = 4, 64
_PROMPT_SETS = 3
"""Each session exists in this many versions that share no token."""
_MEAN_PAUSE_S = 0.2
_BURST_S = 6.0
_RECONNECT_SHARE = 0.8
_LONGEST_UNTIL_CANCEL_S = 0.8


@dataclass(frozen=True, slots=True)
class SoakCall:
    """One call to send."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(slots=True)
class _Client:
    calls: Iterator[tuple[tuple[int, ...], int]]
    due_s: float
    again: tuple[tuple[int, ...], int] | None = None


class SoakTraffic:
    """``clients`` at most are busy at one time; how many are, changes every few seconds."""

    def __init__(
        self, trace: Path, *, seed: int, clients: int, cancel_share: float, max_model_len: int
    ) -> None:
        self._rng = random.Random(f"{seed} traffic")
        self._seed = seed
        self._trace: ScaledTrace = scale_trace(load_trace(trace), _SCALE, max_model_len)
        self._max_model_len = max_model_len
        self._cancel_share = cancel_share
        self._most = clients
        self._wanted = clients
        self._next_burst_s = 0.0
        self._idle: list[_Client] = []
        self._busy: dict[str, _Client] = {}
        self._cut_at_s: dict[str, float] = {}
        self._sent = 0
        self.cancels = 0
        self.reconnects = 0

    def due(self, now_s: float) -> list[SoakCall]:
        """The calls to send now."""
        if now_s >= self._next_burst_s:
            self._wanted = self._rng.randint(0, self._most)
            self._next_burst_s = now_s + self._rng.uniform(0.5, 1.5) * _BURST_S
        while len(self._busy) + len(self._idle) < self._wanted:
            self._idle.append(_Client(self._session(), now_s + self._pause_s()))
        found = []
        for client in [one for one in self._idle if one.due_s <= now_s]:
            if len(self._busy) >= self._wanted:
                break
            self._idle.remove(client)
            call = self._next(client)
            if call is not None:
                found.append(call)
                if self._rng.random() < self._cancel_share:
                    wait_s = self._rng.uniform(0.0, _LONGEST_UNTIL_CANCEL_S)
                    self._cut_at_s[call.request_id] = now_s + wait_s
        return found

    def to_cancel(self, now_s: float) -> list[str]:
        """The calls to cut now."""
        return [name for name, at_s in self._cut_at_s.items() if at_s <= now_s]

    def cancelled(self, call: SoakCall, now_s: float) -> None:
        """The client comes back with the same prompt, or never."""
        client = self._end(call.request_id)
        self.cancels += 1
        if self._rng.random() < _RECONNECT_SHARE:
            client.again = (call.prompt, call.max_tokens)
            client.due_s = now_s + self._rng.uniform(0.0, 0.2)
            self.reconnects += 1
            self._idle.append(client)

    def answered(self, call: SoakCall, now_s: float) -> None:
        """The client continues with its session after a pause."""
        client = self._end(call.request_id)
        client.due_s = now_s + self._pause_s()
        self._idle.append(client)

    def _end(self, request_id: str) -> _Client:
        self._cut_at_s.pop(request_id, None)
        return self._busy.pop(request_id)

    def _next(self, client: _Client) -> SoakCall | None:
        prompt, max_tokens = client.again or next(client.calls, (None, 0))
        client.again = None
        if prompt is None:
            return None
        self._sent += 1
        call = SoakCall(f"call-{self._sent}", prompt, max_tokens)
        self._busy[call.request_id] = client
        return call

    def _session(self) -> Iterator[tuple[tuple[int, ...], int]]:
        session = self._rng.choice(self._trace.sessions)
        seed = self._seed * _PROMPT_SETS + self._rng.randrange(_PROMPT_SETS)
        prompts = PromptMaker(self._trace.scale, seed, TokenRange())
        return (
            (tuple(prompts.token_ids(call)), self._answer_tokens(call)) for call in session.calls
        )

    def _answer_tokens(self, call: ScaledCall) -> int:
        wanted = min(_MAX_ANSWER, max(_MIN_ANSWER, call.output_tokens * _ANSWER_SCALE))
        return min(wanted, self._max_model_len - call.input_tokens)

    def _pause_s(self) -> float:
        return self._rng.expovariate(1 / _MEAN_PAUSE_S)


_RESET_SHARE = 0.04
_MULTIPLIERS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget all prefixes; ``running`` preempts what runs, ``connector`` forgets chunks too."""

    running: bool
    connector: bool


Move = EngineCommand | Reset


class Moves:
    """``geometry`` and what the node can do come from ``report``."""

    def __init__(self, seed: int, report: EngineReport) -> None:
        self._rng = random.Random(f"{seed} moves")
        self._geometry = report.geometry
        self._can_release = report.reserve.can_release

    def next(self, last: EngineReport | None = None) -> Move:
        """One move; most change one or two levers. ``last`` is the last report: its requests
        can have their own leases."""
        rng = self._rng
        if rng.random() < _RESET_SHARE:
            return Reset(running=rng.random() < 0.5, connector=rng.random() < 0.5)
        fields: dict[str, Any] = {}
        draws: dict[str, tuple[float, Callable[[], object]]] = {
            "offload_target_blocks": (0.6, self._offload_blocks),
            "reserve_target_blocks": (0.15, self._reserve_blocks),
            "multiplier": (0.35, lambda: rng.choice(_MULTIPLIERS)),
            "watermark": (0.25, self._watermark),
            "admission": (0.3, self._admission),
        }
        if self._can_release:
            draws["release_reserve"] = (0.1, lambda: rng.random() < 0.5)
        if last is not None and last.requests_hot:
            draws["hot_leases"] = (0.2, lambda: self._leases(last))
        while not fields:
            for name, (share, draw) in draws.items():
                if rng.random() < share:
                    fields[name] = draw()
        return EngineCommand(**fields)

    def pause_s(self, mean_s: float) -> float:
        """Until the next move."""
        return self._rng.uniform(0.2, 1.8) * mean_s

    def _offload_blocks(self) -> int:
        budget = self._geometry.budget_blocks
        # Half of the targets are small, where the pool is a cliff.
        return self._rng.randrange(self._rng.choice((budget // 8, budget + 1)))

    def _reserve_blocks(self) -> int:
        return self._rng.choice((0, 0, self._rng.randrange(self._geometry.budget_blocks)))

    def _leases(self, last: EngineReport) -> dict[str, int]:
        """If one request gets more, another gets less; at times all get the same."""
        if self._rng.random() < 0.2:
            return {}
        geometry, even = self._geometry, last.hot.lease_blocks
        least = -(-geometry.topk // geometry.block_tokens)
        names = [one.request_id for one in last.requests_hot]
        self._rng.shuffle(names)
        leases: dict[str, int] = {}
        for more, less in zip(names[::2], names[1::2], strict=False):
            shift = self._rng.randint(
                0, max(0, min(even - least, geometry.max_lease_blocks - even))
            )
            leases |= {more: even + shift, less: even - shift}
        return leases

    def _watermark(self) -> int | str:
        blocks = self._geometry.gpu_blocks_total
        return self._rng.choice(("default", 0, blocks // 8, blocks // 2, blocks))

    def no_limits(self) -> AdmissionRules:
        """Limits that let every call run that the node was started for."""
        return AdmissionRules(AdmissionOrder.ARRIVAL, 30.0, self._geometry.max_num_seqs)

    def _admission(self) -> AdmissionRules:
        rng = self._rng
        return AdmissionRules(
            order=rng.choice(tuple(AdmissionOrder)),
            ageing_s=rng.choice((0.01, 0.5, 5.0, 30.0)),
            max_running=rng.choice((1, 2, 4, self._geometry.max_num_seqs)),
        )
