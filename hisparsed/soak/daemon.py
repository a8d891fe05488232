"""The soak of a real daemon: calls over HTTP, moves through the control API, real time.

Every move is a value set in the policy; the engine moves at the next tick. The journal gives what
was applied. Answers are verified after the node has ended, by an engine of the same model in this
process.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from hisparsed.config.node import NodeConfig
from hisparsed.config.sections import ReferenceConfig
from hisparsed.control.journal.records import APPLIED_JSON, Applied
from hisparsed.control.journal.store import FILE_NAME
from hisparsed.control.status.document import Status
from hisparsed.demo.node import DemoNode, DemoSettings
from hisparsed.engine.reference.launch import SERVED_MODEL_NAME
from hisparsed.errors import UserError
from hisparsed.replay.client import http_client
from hisparsed.soak.engine import InProcessEngine, Oracle, SampledAnswer, SteppedClock, WrongAnswer
from hisparsed.soak.result import SoakResult, SoakTotals
from hisparsed.soak.run import save_document
from hisparsed.soak.settings import MAX_MULTIPLIER, SoakSettings
from hisparsed.soak.workload import SoakCall, SoakTraffic

_TURN_S = 0.02
FIRST_VALUES: dict[str, str | int | float] = {
    "tick": "100ms",
    "rebalance.strategy": "fixed",
    "rebalance.step_towards_safety": "50%",
    "rebalance.step": "50%",
    "rebalance.cool_down_towards_safety": "0s",
    "rebalance.cool_down": "0s",
    "hot.start": 1.0,
}


def demo_settings(settings: SoakSettings) -> DemoSettings:
    """The daemon's node: its slab is too small for what runs."""
    return DemoSettings(
        max_num_seqs=8,
        max_model_len=1024,
        gpu_blocks=320,
        host_budget="16MiB",
        max_num_batched_tokens=256,
        seed=settings.seed,
    )


def next_value(rng: random.Random) -> tuple[str, str | int | float]:
    """A key of the policy and a value for it."""
    draws: tuple[tuple[str, Callable[[], str | int | float]], ...] = (
        ("pools.offload.start", lambda: f"{rng.randrange(3, 50)}%"),
        ("pools.reserve", lambda: f"{rng.choice((0, 5, 20))}%"),
        ("hot.max", lambda: rng.choice((1.0, 1.5, 2.0, 3.0, 4.0))),
        ("admission.order", lambda: rng.choice(("arrival", "held-prefix-first"))),
        ("admission.max_running", lambda: rng.choice((1, 2, 4, 8))),
        ("watermark.value", lambda: rng.choice((0, 40, 160))),
    )
    key, draw = rng.choices(draws, weights=(5, 1, 2, 1, 1, 1))[0]
    return key, draw()


@dataclass
class DaemonRun:
    """What the client side of a soak saw; gaps in seconds."""

    samples: list[SampledAnswer] = field(default_factory=list)
    requests: int = 0
    stuck: int = 0
    errors: list[str] = field(default_factory=list)
    values_set: int = 0
    values_refused: int = 0
    statuses: list[Status] = field(default_factory=list)
    """One after each move."""
    gaps_moving_s: list[float] = field(default_factory=list)
    gaps_quiet_s: list[float] = field(default_factory=list)


class DaemonSoak:
    """Drives one running node for ``settings.for_s``; ``stop`` ends it early."""

    def __init__(
        self,
        settings: SoakSettings,
        node: DemoNode,
        traffic: SoakTraffic,
        on_progress: Callable[[DaemonRun], None],
    ) -> None:
        self._settings = settings
        self._node = node
        self._traffic = traffic
        self._on_progress = on_progress
        self._moves = random.Random(f"{settings.seed} daemon moves")
        self._sampling = random.Random(f"{settings.seed} samples")
        self._open: dict[str, tuple[SoakCall, asyncio.Task[None]]] = {}
        self._began_s = time.monotonic()
        self.run_so_far = DaemonRun()
        self.stop = asyncio.Event()

    async def run(self) -> DaemonRun:
        """Send, cut and move until the time is up; then let open calls end."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self.stop.set)
        transport = httpx.AsyncHTTPTransport(uds=str(self._node.socket))
        async with (
            http_client(self._node.url, self._settings.stuck_after_s) as http,
            httpx.AsyncClient(transport=transport, base_url="http://node", timeout=30.0) as control,
        ):
            for key, value in FIRST_VALUES.items():
                if not await self._set(control, key, value):
                    raise UserError(f"the node refused {key} = {value}, with which a soak begins")
            moving = asyncio.create_task(self._move(control))
            while not self._over():
                self._node.require_alive()
                await self._turn(http)
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)
            open_tasks = [task for _, task in self._open.values()]
            if open_tasks:
                await asyncio.wait(open_tasks, timeout=self._settings.stuck_after_s)
            self.run_so_far.stuck += len(self._open)
            for task in open_tasks:
                task.cancel()
            await asyncio.gather(*open_tasks, return_exceptions=True)
        return self.run_so_far

    def _over(self) -> bool:
        passed_s = time.monotonic() - self._began_s
        return self.stop.is_set() or passed_s >= (self._settings.for_s or 0.0)

    def _quiet(self) -> bool:
        passed_s = (time.monotonic() - self._began_s) % self._settings.quiet_every_s
        return passed_s >= self._settings.quiet_every_s - self._settings.quiet_s

    async def _turn(self, http: httpx.AsyncClient) -> None:
        now_s = time.monotonic()
        for call in self._traffic.due(now_s):
            task = asyncio.create_task(self._send(http, call))
            self._open[call.request_id] = (call, task)
        for name in self._traffic.to_cancel(now_s):
            call, task = self._open.pop(name)
            task.cancel()
            self._traffic.cancelled(call, now_s)
        self._on_progress(self.run_so_far)
        await asyncio.sleep(_TURN_S)

    async def _send(self, http: httpx.AsyncClient, call: SoakCall) -> None:
        tokens: list[int] = []
        try:
            async with asyncio.timeout(self._settings.stuck_after_s):
                await self._stream(http, call, tokens)
        except (httpx.HTTPError, TimeoutError, ValueError, KeyError) as error:
            self.run_so_far.errors.append(f"{call.request_id}: {type(error).__name__}: {error}")
        finally:
            if tokens and self._sampling.random() < self._settings.sample_share:
                sample = SampledAnswer(call.request_id, 0, call.prompt, tuple(tokens))
                self.run_so_far.samples.append(sample)
        if len(tokens) == call.max_tokens:
            self.run_so_far.requests += 1
        else:
            self.run_so_far.stuck += 1
        del self._open[call.request_id]
        self._traffic.answered(call, time.monotonic())

    async def _stream(self, http: httpx.AsyncClient, call: SoakCall, tokens: list[int]) -> None:
        body = {
            "model": SERVED_MODEL_NAME,
            "prompt": list(call.prompt),
            "max_tokens": call.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        last_s: float | None = None
        async with http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    tokens.extend(choice.get("token_ids") or [])
                now_s = time.monotonic()
                if last_s is not None:
                    run = self.run_so_far
                    gaps = run.gaps_quiet_s if self._quiet() else run.gaps_moving_s
                    gaps.append(now_s - last_s)
                last_s = now_s

    async def _move(self, control: httpx.AsyncClient) -> None:
        while True:
            pause_s = self._moves.uniform(0.2, 1.8) * self._settings.moves_every_s
            await asyncio.sleep(pause_s)
            if not self._quiet():
                with suppress(httpx.TransportError):
                    await self._set(control, *next_value(self._moves))
                    await self._look(control)

    async def _look(self, control: httpx.AsyncClient) -> None:
        answer = await control.get("/v1/status")
        if answer.is_success:
            self.run_so_far.statuses.append(Status.model_validate(answer.json()))

    async def _set(self, control: httpx.AsyncClient, key: str, value: str | int | float) -> bool:
        body = {"actor": "soak", "key": key, "value": value, "for_s": None}
        answer = await control.post("/v1/policy/set", json=body)
        if answer.is_success:
            self.run_so_far.values_set += 1
        else:
            self.run_so_far.values_refused += 1
        return answer.is_success


_BROKEN = "host ledger broke"
"""How the engine says that a command was refused for a violation."""


def run_daemon_soak(
    settings: SoakSettings,
    on_progress: Callable[[DaemonRun], None],
    *,
    record_folder: Path | None = None,
) -> SoakResult:
    """Run one soak of a daemon. Ctrl-C ends it early, with the result so far.

    Raises ``UserError`` when the daemon does not start or does not last.
    """
    demo = demo_settings(settings)
    traffic = SoakTraffic(
        settings.trace,
        seed=settings.seed,
        clients=settings.clients,
        cancel_share=settings.cancel_share,
        max_model_len=demo.max_model_len,
    )
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hisparsed-soak-") as name:
        folder = Path(name)
        with DemoNode(demo, folder / "node", "act") as node:
            soak = DaemonSoak(settings, node, traffic, on_progress)
            run = asyncio.run(soak.run())
        applied = applied_commands(folder / "node" / "state" / FILE_NAME)
        differences = verify(demo, run.samples, folder / "oracle")
    tally = tally_of(run, applied)
    tally.token_differences = len(differences)
    wrong = tally.violations or differences or run.stuck
    document = {
        "seed": settings.seed,
        "violations": tally.violations,
        "errors": run.errors,
        "differences": differences,
        "applied": applied,
    }
    result = tally.result(
        settings,
        seconds=time.monotonic() - began_s,
        verified=len(run.samples),
        cancels=traffic.cancels,
        reconnects=traffic.reconnects,
        interrupted=soak.stop.is_set(),
        record=str(save_document(document, record_folder)) if wrong else None,
    )
    observed = run.statuses[-1].observed if run.statuses else None
    if observed is None:
        return result
    preemptions, progress = observed.requests.preemptions_total, observed.progress
    steps = progress.steps_total if progress is not None else 0
    hits = observed.prefix.hit_tokens_total
    return replace(result, preemptions=preemptions, steps=steps, prefix_hit_tokens=hits)


def applied_commands(journal: Path) -> list[Applied]:
    """What the control loop sent to the engine, oldest first, and what came of it."""
    with closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as store:
        rows = store.execute("SELECT applied FROM ticks WHERE applied != 'null' ORDER BY id")
        found = [APPLIED_JSON.validate_json(text) for (text,) in rows]
    return [one for one in found if one is not None]


def tally_of(run: DaemonRun, applied: list[Applied]) -> SoakTotals:
    """The counts of a soak, from the client's side and the journal's."""
    tally = SoakTotals(requests=run.requests, stuck=run.stuck, moves=len(applied))
    tally.moves_refused = sum(one.error is not None for one in applied)
    tally.violations = [one.error for one in applied if one.error and _BROKEN in one.error]
    tally.move_us = [one.result.apply_us for one in applied if one.result is not None]
    tally.gaps_moving_s, tally.gaps_quiet_s = run.gaps_moving_s, run.gaps_quiet_s
    for status in run.statuses:
        observed = status.observed
        if observed is None:
            continue
        tally.reports += 1
        tally.report_us.append(observed.report_cost_s * 1e6)
        tally.pending_seen += observed.pending_blocks > 0
        tally.draining_seen += observed.draining_blocks > 0
        for name in ("full", "mixed", "none"):
            if getattr(observed.requests, name):
                tally.residency.add(name)
    return tally


def verify(demo: DemoSettings, samples: list[SampledAnswer], folder: Path) -> list[WrongAnswer]:
    """Which samples an untouched engine of the daemon's model answers differently."""
    config = NodeConfig(
        node="reference",
        host_budget=64 << 20,
        reference=ReferenceConfig(
            gpu_blocks=4000,
            max_model_len=demo.max_model_len,
            max_num_batched_tokens=demo.max_num_batched_tokens,
            seed=demo.seed,
        ),
        state_dir=folder,
    )
    engine = InProcessEngine(config, max_multiplier=MAX_MULTIPLIER, clock=SteppedClock())
    try:
        oracle = Oracle(engine)
        found = [difference for sample in samples for difference in oracle.take(sample)]
        return found + oracle.settle()
    finally:
        engine.close()
