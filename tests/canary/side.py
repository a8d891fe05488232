"""The control plane of a node around a canary, with an engine that answers from a script.

The clock moves when told, and nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hisparsed.canary.round import Answer, CanaryEngine, Question
from hisparsed.canary.watch import CanaryWatch
from hisparsed.control.events import Announcer, Broadcast
from hisparsed.control.holds import Overrides
from hisparsed.control.journal.journal import Journal, JournalWriter
from hisparsed.control.journal.records import TickRecord
from hisparsed.control.observe import observe
from hisparsed.control.status.current import TickOutcome
from hisparsed.engine.messages import (
    CanaryReport,
    EngineReport,
    GeometryReport,
    HostReport,
    HotReport,
    RequestHotReport,
    RequestsReport,
)
from hisparsed.engine.port import ServingCounters
from hisparsed.policy.decide import decide
from hisparsed.policy.memory import Memory
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Admission, AdmissionOrder, Lever

IDLE = EngineReport(
    monotonic_s=0.0,
    steps=7,
    scheduled_tokens=70,
    geometry=GeometryReport(
        block_tokens=16,
        host_block_bytes=16 * 5_120,
        chunk_tokens=16,
        chunk_bytes=16 * 256,
        chunks_per_host_block=20,
        offload_copies=1,
        budget_blocks=1_000,
        floor_blocks=66,
        max_model_len=1_024,
        topk=64,
        decode_query_len=1,
        gpu_blocks=400,
        hot_groups=2,
        max_lease_blocks=16,
        max_num_seqs=8,
        row_bytes=1_280,
    ),
    host=HostReport(
        hisparse_capacity_blocks=900,
        hisparse_in_use_blocks=0,
        hisparse_idle_blocks=900,
        hisparse_cached_blocks=0,
        offload_target_blocks=100,
        lent_blocks=100,
        pending_blocks=0,
        draining_blocks=0,
        offload_stored_chunks=40,
        offload_in_flight_chunks=0,
        head_need_blocks=0,
    ),
    gpu_free_blocks=300,
    waiting_for_blocks=False,
    requests=RequestsReport(
        running=1, waiting=0, full=1, mixed=0, none=0, preemptions=0, finished=9, held_back=0
    ),
    hot=HotReport(
        multiplier=4.0,
        lease_blocks=16,
        leased_requests=1,
        leased_blocks=16,
        references=1_000,
        resident=1_000,
        hits=0,
        loads=0,
        spills=0,
        dropped=0,
        h2d_bytes=0,
        miss_curve=[],
        requests=[RequestHotReport(request_id="of-a-user", lease_blocks=16, target_blocks=16)],
    ),
    live_set_tokens=0,
    live_sessions=0,
    admission_order="arrival",
    max_running=8,
    transition_watermark=100,
    default_watermark=True,
    report_us=200.0,
)


RIGHT = (5, 6, 7, 8)
Reply = Callable[[Question], "tuple[int, ...] | Exception"]


class Scripted:
    """Answers what ``reply`` says; an exception is raised instead."""

    def __init__(self) -> None:
        self.asked: list[Question] = []
        self.reply: Reply = lambda question: RIGHT

    def tokens_of(self, text: str) -> list[int]:
        return list(text.encode())

    async def ask(self, question: Question) -> Answer:
        self.asked.append(question)
        tokens = self.reply(question)
        if isinstance(tokens, Exception):
            raise tokens
        steps = {"full": 0, "mixed": 0, "none": 0, question.residency: 3}
        seen = CanaryReport(**steps, scheduled_tokens=20, step_s=0.5)
        return Answer(tokens, 0 if question.recompute else 96, seen)


class Side:
    """Overrides, journal and events of a node, its canary, and a clock that moves when told."""

    def __init__(self, folder: Path, engine: CanaryEngine) -> None:
        self.now_s = 1_000.0
        self.folder = folder
        self.overrides = Overrides()
        writer = JournalWriter(
            folder, run="run", clock=self.clock, stamp=lambda: "20260101T000000", log=print
        )
        self.journal = Journal(writer, run="run")
        announcer = Announcer(self.journal, Broadcast(), wall_clock=self.wall_clock)
        self.canary = CanaryWatch(
            engine,
            self.overrides,
            announcer,
            self.journal,
            folder,
            clock=self.clock,
            wall_clock=self.wall_clock,
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
        order = AdmissionOrder(report.admission_order)
        snapshot = observe(
            report,
            ServingCounters(),
            at_s=self.now_s,
            report_age_s=0.0,
            tick=1,
            policy_generation=1,
            last_admission=Admission(order, 30.0, 8, None, 10.0),
            live_levers=frozenset(Lever),
            frozen_levers=self.overrides.frozen,
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
        return TickOutcome(record, report, ServingCounters(), policy, self.now_s, 0.0)
