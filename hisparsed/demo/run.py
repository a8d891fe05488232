"""The demo from start to end: two nodes at once, the same calls to both, one summary.

One node runs with the policy on, the other with it off; both start together, get the same whole
calls at the same time, and share the machine, so that whatever else runs on it slows both. Each is
a real daemon in its own process; this process only sends calls and reads the control sockets.
Progress goes to ``say``, the result is returned.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hisparsed.control.api.client import ControlClient
from hisparsed.control.journal.records import DecisionView
from hisparsed.demo.node import (
    LOOK_S,
    MODELS,
    START_REACH_TOKENS,
    DemoNode,
    DemoSettings,
    end_nodes,
)
from hisparsed.demo.origin import origin_of
from hisparsed.demo.summary import Comparison, NodeRun, Sizing, sentences
from hisparsed.demo.workload import (
    DEFAULT_LOAD,
    Workload,
    calls_within,
    make_workload,
    work_of,
)
from hisparsed.engine.reference.launch import SERVED_MODEL_NAME
from hisparsed.errors import UserError
from hisparsed.replay.client import RequestSettings
from hisparsed.replay.plan import ReplayPlan
from hisparsed.replay.results import ReplayResult
from hisparsed.replay.runner import ReplayProgress, replay
from hisparsed.replay.scaled_trace import PromptMaker, ScaledCall, ScaledSession, TokenRange
from hisparsed.replay.trace import load_trace

WHOLE_S = 180.0
"""Time of a demo without ``--for``, from its start to its summary."""
_LEAST_CALLS_S = 100.0
_END_S = 6.0
"""The part of it for the end: stop the nodes, write the report."""
_LEAVE_VIEW_S = 3.0
_WATCH_S = 1.0
_PROGRESS_S = 5.0
_REQUEST_TIMEOUT_S = 300.0
_STOP_S = 15.0
_INTERRUPTED_STOP_S = 3.0
"""The nodes are not needed any more; they are killed after this time."""
_ALL_DECISIONS = 1000
_FIRST_EVER = ScaledCall(0, (), -1, input_tokens=256, output_tokens=8, think_time_s=0.0)
"""One call to each node before all others: torch initialises itself in the first step."""


@dataclass(frozen=True)
class DemoOptions:
    """The options. ``calls_s``: about how long the compared calls take; ``None`` is the rest of
    ``WHOLE_S``. ``concurrency`` overrules ``load``. ``view``: the terminal shows both nodes while
    they run; no lines are printed meanwhile."""

    model: str = "standard"
    load: float = DEFAULT_LOAD
    concurrency: int | None = None
    calls_s: float | None = None
    seed: int = 0
    view: bool = False

    @property
    def settings(self) -> DemoSettings:
        """Sizes of both nodes. Raises ``UserError`` for an unknown model."""
        if self.model not in MODELS:
            raise UserError(f"--model: {self.model!r} is not right; need {' or '.join(MODELS)}")
        return replace(MODELS[self.model], seed=self.seed)


@dataclass(frozen=True)
class Pair:
    """Two nodes that serve, and the progress of the replay on each."""

    on: DemoNode
    off: DemoNode

    def require_alive(self) -> None:
        """Raise ``UserError`` when one of them has ended."""
        self.on.require_alive()
        self.off.require_alive()


def run_demo(options: DemoOptions, *, say: Callable[[str], None]) -> Comparison:
    """Run both nodes and compare them.

    Raises ``UserError`` when a node does not start or ends early, and ``KeyboardInterrupt`` when
    interrupted; in every case no process is left.
    """
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hisparsed-demo-") as name:
        try:
            return asyncio.run(_Demo(options, Path(name), say, began_s).run())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


class _Demo:
    def __init__(
        self, options: DemoOptions, folder: Path, say: Callable[[str], None], began_s: float
    ) -> None:
        self._options = options
        self._folder = folder
        self._tell = say
        self._quiet = False
        self._began_s = began_s

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def _say(self, line: str) -> None:
        if not self._quiet:
            self._tell(line)

    async def run(self) -> Comparison:
        task = asyncio.current_task()
        for number in (signal.SIGTERM, signal.SIGHUP):  # asyncio itself handles SIGINT
            asyncio.get_running_loop().add_signal_handler(number, task.cancel if task else int)
        settings = self._options.settings
        self._say(
            "Starting two nodes, one with the policy on and one with it off. Each imports vLLM "
            "twice, in its own process and in its engine's; that takes most of the time."
        )
        async with self._nodes(settings) as pair:
            workload, _ = await asyncio.gather(
                asyncio.to_thread(self._workload, settings), self._until_serving(pair)
            )
            replays = _Replays(pair, workload, settings.seed)
            sizing = await self._size(replays, workload)
            began_unix_s = time.time()
            results = await self._replay(replays, workload.after_first(sizing.calls))
            on = await asyncio.to_thread(_node_run, pair.on, results[0])
            off = await asyncio.to_thread(_node_run, pair.off, results[1])
        origin = origin_of(self._options.model, settings)
        return Comparison(sizing, on, off, began_unix_s, origin)

    def _workload(self, settings: DemoSettings) -> Workload:
        return make_workload(
            load_trace(),
            reach_tokens=START_REACH_TOKENS,
            max_model_len=settings.max_model_len,
            seed=settings.seed,
            load=self._options.load,
            concurrency=self._options.concurrency,
        )

    @asynccontextmanager
    async def _nodes(self, settings: DemoSettings) -> AsyncIterator[Pair]:
        pair = Pair(
            DemoNode(settings, self._folder / "on", "act"),
            DemoNode(settings, self._folder / "off", "off"),
        )
        nodes = (pair.on, pair.off)
        within_s = _STOP_S
        try:
            for node in nodes:
                node.begin()
            yield pair
        except asyncio.CancelledError:
            self._say("Interrupted: ending both nodes ...")
            within_s = _INTERRUPTED_STOP_S
            raise
        finally:
            end_nodes(nodes, within_s)

    async def _until_serving(self, pair: Pair) -> None:
        waiting = {"on": pair.on, "off": pair.off}
        stages: dict[str, str] = {}
        while waiting:
            for name, node in list(waiting.items()):
                if await asyncio.to_thread(node.is_serving):
                    stage = "serves"
                    del waiting[name]
                else:
                    stage = node.stage()
                if stages.get(name) != stage:
                    stages[name] = stage
                    self._say(f"  policy {name}: {stage} ({self._elapsed_s():.0f} s)")
            await asyncio.sleep(LOOK_S)
        self._say(
            f"Both serve after {self._elapsed_s():.0f} s: policy on {pair.on.url}/v1, "
            f"policy off {pair.off.url}/v1."
        )

    async def _size(self, replays: _Replays, workload: Workload) -> Sizing:
        """Measure the speed with the first calls, and derive the number of calls from it."""
        self._say(
            f"{workload.concurrency} coding sessions at a time: a live set of "
            f"{workload.live_set_tokens:,} tokens, {workload.load:.1f} times the "
            f"{workload.reach_tokens:,} that the pools reach at the start."
        )
        await replays.send((ScaledSession("warm-up", (_FIRST_EVER,), 0.0),))
        first = workload.first_calls
        calls = [call for session in first for call in session.calls]
        self._say(
            f"Measuring the machine with the first call of each session, {len(calls)} calls ..."
        )
        results = await replays.send(first)
        seconds = sum(result.seconds for result in results) / len(results)
        calls_s = self._options.calls_s
        if calls_s is None:
            calls_s = max(WHOLE_S - _END_S - self._elapsed_s(), _LEAST_CALLS_S)
        work = calls_s * work_of(calls) / seconds
        more = await asyncio.to_thread(calls_within, workload, work)
        more = max(more, workload.concurrency)
        sizing = Sizing(
            calls=more,
            concurrency=workload.concurrency,
            load=workload.load,
            tokens_per_s=sum(call.input_tokens for call in calls) / seconds,
        )
        self._say(
            f"Each node computes {sizing.tokens_per_s:,.0f} prompt tokens per second while "
            f"both run: {more} calls for each, about {calls_s:.0f} s."
            + ("" if sizing.tells else " That is too few to compare two policies.")
        )
        return sizing

    async def _replay(
        self, replays: _Replays, sessions: tuple[ScaledSession, ...]
    ) -> list[ReplayResult]:
        watching = asyncio.create_task(self._watch(replays))
        try:
            async with self._view(replays):
                return await replays.send(sessions)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    @asynccontextmanager
    async def _view(self, replays: _Replays) -> AsyncIterator[None]:
        """The live view, if it is wanted, until the operator leaves it or the block ends."""
        if not self._options.view:
            yield
            return
        from hisparsed.demo.screen import DemoView, Left

        pair, demo = replays.pair, asyncio.current_task()
        view = DemoView(
            {"policy-on": pair.on.socket, "policy-off": pair.off.socket}, replays.progress_text
        )

        async def show() -> None:
            self._quiet = True
            try:
                left = await view.show()
            finally:
                self._quiet = False
            if left is Left.INTERRUPTED and demo is not None:
                demo.cancel()

        showing = asyncio.create_task(show())
        try:
            yield
        finally:
            view.close()
            await asyncio.wait({showing}, timeout=_LEAVE_VIEW_S)
            showing.cancel()
            (left,) = await asyncio.gather(showing, return_exceptions=True)
            if isinstance(left, Exception):
                self._say(f"The live view failed: {left!r}")

    async def _watch(self, replays: _Replays) -> None:
        """Print the decisions of the policy as they happen, and the progress at intervals."""
        seen = 0
        said_at = time.monotonic()
        with ControlClient(replays.pair.on.socket, timeout_s=30.0) as client:
            while True:
                await asyncio.sleep(_WATCH_S)
                try:
                    replays.pair.require_alive()
                except UserError:
                    replays.stop.set()
                    return
                try:
                    views = await asyncio.to_thread(client.decisions, limit=60, notable="true")
                except UserError:  # too busy to answer now
                    continue
                for line in sentences([view for view in views if view.tick > seen]):
                    self._say(f"  {line}")
                seen = max([seen, *(view.tick for view in views)])
                if time.monotonic() - said_at >= _PROGRESS_S:
                    said_at = time.monotonic()
                    self._say(f"  {replays.progress_text()}")


class _Replays:
    """The same calls to both nodes at the same time."""

    def __init__(self, pair: Pair, workload: Workload, seed: int) -> None:
        self.pair = pair
        self.stop = asyncio.Event()
        self._concurrency = workload.concurrency
        self._prompts = PromptMaker(workload.scale, seed, TokenRange())
        self._latest: dict[str, ReplayProgress] = {}

    async def send(self, sessions: tuple[ScaledSession, ...]) -> list[ReplayResult]:
        """All calls of ``sessions``; raises ``UserError`` when a node ends or answers none."""
        self._latest.clear()
        nodes = {"on": self.pair.on, "off": self.pair.off}
        results = await asyncio.gather(
            *(self._replay(name, node.url, sessions) for name, node in nodes.items())
        )
        self.pair.require_alive()
        for result in results:
            if all(call.error is not None for call in result.calls):
                raise UserError("the demo's node answered no call")
        return results

    async def _replay(
        self, name: str, url: str, sessions: tuple[ScaledSession, ...]
    ) -> ReplayResult:
        plan = ReplayPlan(
            url,
            RequestSettings(SERVED_MODEL_NAME, timeout_s=_REQUEST_TIMEOUT_S),
            self._prompts,
            sessions,
            concurrency=self._concurrency,
        )

        def note(progress: ReplayProgress) -> None:
            self._latest[name] = progress

        return await replay(plan, on_progress=note, stop=self.stop)

    def progress_text(self) -> str:
        """The progress of both, and the estimated time that the slower one still needs."""
        on, off = (self._latest.get(name) for name in ("on", "off"))
        if on is None or off is None:
            return "no call has ended on both nodes yet"
        left_s = max(one.seconds * (one.total / one.done - 1) for one in (on, off))
        failed = on.failed + off.failed
        return (
            f"policy on {on.done}, off {off.done} of {on.total} calls, {failed} failed; "
            f"about {left_s:.0f} s left"
        )


def _node_run(node: DemoNode, result: ReplayResult) -> NodeRun:
    with ControlClient(node.socket, timeout_s=30.0) as client:
        decisions: list[DecisionView] = client.decisions(limit=_ALL_DECISIONS, notable="true")
        history = client.get("/v1/history")
    return NodeRun(
        result=result,
        decisions=tuple(view for view in decisions if view.acts),
        history=history,
    )
