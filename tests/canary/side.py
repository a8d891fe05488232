"""The control plane of a node around a canary, with an engine that answers from a script.

The test moves the clock, and nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hisparsed.canary.round import CanaryAnswer, CanaryEngine, CanaryQuestion
from hisparsed.canary.verdict import Position, RecordedAnswer
from hisparsed.canary.watch import CanaryWatch
from hisparsed.control.events import Broadcast, EventRecorder
from hisparsed.control.holds import Holds
from hisparsed.control.journal.journal import Journal, JournalWriter
from hisparsed.control.journal.records import TickRecord
from hisparsed.control.observe import observe
from hisparsed.control.status.current import TickOutcome
from hisparsed.engine.messages import CanaryReport
from hisparsed.engine.port import ServingCounters
from hisparsed.policy.decide import decide
from hisparsed.policy.memory import Memory
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import (
    AdmissionOrder,
    AdmissionRules,
    EngineReport,
    GpuPool,
    HiSparsePool,
    HotBuffers,
    Lever,
    LiveSet,
    OffloadPool,
    PoolGeometry,
    Progress,
    RequestHot,
    Requests,
    Watermark,
)

IDLE = EngineReport(
    geometry=PoolGeometry(
        block_tokens=16,
        host_block_bytes=16 * 5_120,
        offload_chunk_tokens=16,
        offload_chunk_bytes=16 * 256,
        chunks_per_host_block=20,
        offload_copies=1,
        budget_blocks=1_000,
        max_model_len=1_024,
        topk=64,
        decode_query_len=1,
        gpu_blocks_total=400,
        hot_block_rows=16,
        hot_groups=2,
        max_lease_blocks=16,
        max_num_seqs=8,
        row_bytes=1_280,
    ),
    hisparse=HiSparsePool(900, 900, 0, 0, 900),
    offload=OffloadPool(2_000, 100, 100, 0, 40),
    pending_blocks=0,
    draining_blocks=0,
    head_need_blocks=0,
    gpu=GpuPool(400, 300, waiting_for_blocks=False),
    requests=Requests(1, 0, 0, 1, 0, 0, 9, held_back=0),
    hot=HotBuffers(
        multiplier=4.0,
        references_total=1_000,
        hits_total=0,
        loads_total=0,
        resident_total=1_000,
        h2d_bytes_total=0,
        lease_blocks=16,
        leased_requests=1,
        leased_blocks=16,
    ),
    requests_hot=(RequestHot("of-a-user", 16, 16),),
    sessions=LiveSet(0, 0),
    admission=AdmissionRules(AdmissionOrder.ARRIVAL, 30.0, 8, None, 10.0),
    watermark=Watermark(100, True),
    progress=Progress(7, 70),
    report_cost_s=0.0002,
)


RIGHT = (5, 6, 7, 8)
Reply = Callable[[CanaryQuestion], "tuple[int, ...] | Exception"]


def surely(tokens: Iterable[int]) -> RecordedAnswer:
    """An answer whose every token is far better than the next one."""
    return tuple(Position(token, {token: -0.01, -1: -9.0}) for token in tokens)


class Scripted:
    """Answers what ``reply`` says; an exception is raised instead."""

    def __init__(self) -> None:
        self.asked: list[CanaryQuestion] = []
        self.reply: Reply = lambda question: RIGHT

    def tokens_of(self, text: str) -> list[int]:
        return list(text.encode())

    async def ask(self, question: CanaryQuestion) -> CanaryAnswer:
        self.asked.append(question)
        tokens = self.reply(question)
        if isinstance(tokens, Exception):
            raise tokens
        steps = {"full": 0, "mixed": 0, "none": 0, question.residency: 3}
        seen = CanaryReport(**steps, scheduled_tokens=20, step_s=0.5)
        return CanaryAnswer(surely(tokens), 0 if question.recompute else 96, seen)


class Side:
    """Holds, journal and events of a node, its canary, and a clock that the test moves."""

    def __init__(self, folder: Path, engine: CanaryEngine, *, exact: bool = True) -> None:
        self.now_s = 1_000.0
        self.folder = folder
        self.holds = Holds()
        writer = JournalWriter(
            folder, run="run", clock=self.clock, stamp=lambda: "20260101T000000", log=print
        )
        self.journal = Journal(writer, run="run")
        recorder = EventRecorder(self.journal, Broadcast(), wall_clock=self.wall_clock)
        self.canary = CanaryWatch(
            engine,
            self.holds,
            recorder,
            self.journal,
            folder,
            clock=self.clock,
            wall_clock=self.wall_clock,
            exact=exact,
        )

    def clock(self) -> float:
        return self.now_s

    def wall_clock(self) -> float:
        return 1_700_000_000.0 + self.now_s

    def events(self) -> list[str]:
        """Oldest first."""
        return [one.kind.value for one in reversed(self.journal.recent_events(50))]

    def last_words(self) -> str:
        return self.journal.recent_events(1)[0].sentence

    async def tick(self, report: EngineReport, **canary: Any) -> None:
        """One tick of a node with this report, and the round that it asks for, to its end."""
        self.canary.watch(self.outcome(report, **canary))
        if self.canary._round is not None:
            await self.canary._round

    def outcome(self, report: EngineReport, **canary: Any) -> TickOutcome:
        policy = Policy.model_validate({"version": 1, "canary": canary})
        snapshot = observe(
            report,
            ServingCounters(),
            at_s=self.now_s,
            report_age_s=0.0,
            tick=1,
            policy_generation=1,
            last_admission=report.admission,
            live_levers=frozenset(Lever),
            frozen_levers=self.holds.frozen,
        )
        decision, _ = decide(policy, snapshot, Memory())
        record = TickRecord(
            self.journal.next_sequence(),
            self.wall_clock(),
            "hash",
            snapshot,
            decision,
            None,
            None,
            frozenset(Lever),
            None,
        )
        self.journal.record(record)
        return TickOutcome(record, policy, self.now_s, 0.0)
