"""The demo from start to end: policy on, policy off, the same calls, one summary.

Each node is a real daemon in a process of its own; this process only sends calls and reads
the control socket. Progress goes to ``say``, the result is returned.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from hisparsed.control.api.client import ControlClient
from hisparsed.control.journal.records import DecisionView
from hisparsed.demo.node import DemoNode, DemoSettings
from hisparsed.demo.summary import NodeRun, in_words, sentences, summary_document
from hisparsed.engine.reference.launch import SERVED_MODEL_NAME
from hisparsed.errors import UserError
from hisparsed.replay.client import RequestSettings
from hisparsed.replay.plan import ReplayPlan, choose_sessions
from hisparsed.replay.results import ReplayResult
from hisparsed.replay.runner import ReplayProgress, replay
from hisparsed.replay.scaled_trace import (
    PromptMaker,
    ScaledSession,
    ScaledTrace,
    TokenRange,
    scale_trace,
)
from hisparsed.replay.trace import load_trace

_WATCH_S = 0.5
_PROGRESS_S = 5.0
_REQUEST_TIMEOUT_S = 300.0
_ALL_DECISIONS = 1000


def run_demo(
    settings: DemoSettings, *, duration_s: float | None, say: Callable[[str], None]
) -> tuple[dict[str, Any], str]:
    """Run both nodes; returns the summary document and the same in words.

    ``duration_s`` bounds the replay with the policy on; the one with the policy off sends the
    calls that were answered. Raises ``UserError`` when a node does not start or does not last.
    """
    trace = scale_trace(load_trace(), settings.scale, settings.max_model_len)
    sessions = choose_sessions(trace, None, settings.seed)
    with tempfile.TemporaryDirectory(prefix="hisparsed-demo-") as name:
        folder = Path(name)
        say("Node with the policy on: starting vLLM on the reference node ...")
        on = _run_node(settings, folder / "on", "act", trace, sessions, duration_s, say)
        again = _answered(sessions, on.result)
        say("Node with the policy off: the same calls again ...")
        off = _run_node(settings, folder / "off", "off", trace, again, None, say)
    document = summary_document(on, off)
    return document, in_words(document, on)


def _run_node(
    settings: DemoSettings,
    folder: Path,
    mode: str,
    trace: ScaledTrace,
    sessions: tuple[ScaledSession, ...],
    duration_s: float | None,
    say: Callable[[str], None],
) -> NodeRun:
    started = time.monotonic()
    with DemoNode(settings, folder, mode) as node:
        say(f"Serving on {node.url}/v1 after {time.monotonic() - started:.1f} s.")
        plan = ReplayPlan(
            node.url,
            RequestSettings(SERVED_MODEL_NAME, timeout_s=_REQUEST_TIMEOUT_S),
            PromptMaker(trace.scale, settings.seed, TokenRange()),
            sessions,
            concurrency=settings.concurrency,
            duration_s=duration_s,
            clipped=trace.clipped,
            dropped=trace.dropped,
        )
        say(f"Replaying {plan.calls} calls of {len(sessions)} coding sessions.")
        result = asyncio.run(_replay_and_watch(plan, node, say))
        node.require_alive()
        with ControlClient(node.socket, timeout_s=30.0) as client:
            serving = client.status().observed
            decisions = _acting(client)
    if not any(call.error is None for call in result.calls):
        raise UserError("the demo's node answered no call")
    prompt = serving.tokens.prompt_total if serving else 0
    hits = serving.prefix.hit_tokens_total if serving else 0
    return NodeRun(
        result=result,
        decisions=tuple(decisions),
        recomputed_tokens=prompt - hits,
        preemptions=serving.requests.preemptions_total if serving else 0,
    )


def _acting(client: ControlClient) -> list[DecisionView]:
    views = client.decisions(limit=_ALL_DECISIONS, notable="true")
    return [view for view in views if view.acts]


async def _replay_and_watch(
    plan: ReplayPlan, node: DemoNode, say: Callable[[str], None]
) -> ReplayResult:
    latest: list[ReplayProgress] = []
    stop = asyncio.Event()

    def note(progress: ReplayProgress) -> None:
        latest[:] = [progress]

    watching = asyncio.create_task(_watch(node, latest, say, stop))
    try:
        return await replay(plan, on_progress=note, stop=stop)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(
    node: DemoNode, latest: list[ReplayProgress], say: Callable[[str], None], stop: asyncio.Event
) -> None:
    """Say what the policy does, as it does it, and now and then how far the replay is."""
    seen = 0
    said_at = time.monotonic()
    transport = httpx.AsyncHTTPTransport(uds=str(node.socket))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://node", timeout=30.0
    ) as client:
        while True:
            await asyncio.sleep(_WATCH_S)
            try:
                node.require_alive()
            except UserError:
                stop.set()
                return
            try:
                answer = await client.get("/v1/decisions", params={"limit": 60, "notable": True})
            except httpx.TransportError:
                continue
            views = [DecisionView.model_validate(one) for one in answer.json()["decisions"]]
            for line in sentences([view for view in views if view.tick > seen]):
                say(f"  {line}")
            seen = max([seen, *(view.tick for view in views)])
            if latest and time.monotonic() - said_at >= _PROGRESS_S:
                said_at = time.monotonic()
                progress = latest[0]
                say(
                    f"  {progress.done}/{progress.total} calls, {progress.tokens_in:,} tokens in, "
                    f"{progress.tokens_out:,} out, {progress.failed} failed, "
                    f"{progress.seconds:.0f} s"
                )


def _answered(
    sessions: tuple[ScaledSession, ...], result: ReplayResult
) -> tuple[ScaledSession, ...]:
    """The sessions cut to the calls that were answered, so that both runs do the same work."""
    counts: dict[str, int] = {}
    for call in result.calls:
        if call.error is None:
            counts[call.session_id] = counts.get(call.session_id, 0) + 1
    return tuple(
        ScaledSession(session.id, session.calls[: counts[session.id]], session.start_s)
        for session in sessions
        if session.id in counts
    )
