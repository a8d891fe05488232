"""A scripted engine, clocks that only the test moves, and a control side around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hisparsed.control.api.app import ControlApi
from hisparsed.control.api.socket import ControlServer
from hisparsed.control.events import Broadcast, EventRecorder
from hisparsed.control.holds import Holds
from hisparsed.control.journal.journal import Journal, JournalWriter
from hisparsed.control.live_policy import PolicySource
from hisparsed.control.loop import ControlLoop, ControlPlane
from hisparsed.control.metrics.collector import ControlMetrics
from hisparsed.control.operator import Operator
from hisparsed.control.state_files import TargetFile
from hisparsed.control.status.current import CurrentStatus, OnTick, StatusSources
from hisparsed.control.status.document import (
    BackgroundStatus,
    CanaryStatus,
    DoctorStatus,
    EngineStatus,
    Lifecycle,
    NodeInfo,
)
from hisparsed.engine.cuda.nvml import GpusStatus
from hisparsed.engine.kernel_choice import KernelsStatus
from hisparsed.engine.messages import ApplyResult
from hisparsed.engine.port import ServingCounters
from hisparsed.policy.decisions import EngineCommand
from hisparsed.policy.keys import PendingRestart
from hisparsed.policy.signals import (
    AdmissionOrder,
    AdmissionRules,
    EngineReport,
    GhostPoint,
    GpuPool,
    HiSparsePool,
    HotBuffers,
    LiveSet,
    OffloadPool,
    PoolGeometry,
    Progress,
    Requests,
    Reserve,
    StepCpu,
    Watermark,
)

BUDGET = 1_000
FLOOR = 66
GEOMETRY = PoolGeometry(
    block_tokens=16,
    host_block_bytes=16 * 5_120,
    offload_chunk_tokens=16,
    offload_chunk_bytes=16 * 256,
    chunks_per_host_block=20,
    offload_copies=1,
    budget_blocks=BUDGET,
    max_model_len=1_024,
    topk=64,
    decode_query_len=1,
    gpu_blocks_total=400,
    hot_block_rows=16,
    hot_groups=2,
    max_lease_blocks=16,
    max_num_seqs=8,
    row_bytes=1_280,
)
POLICY = """\
version: 1
mode: act
tick: 1s
stale_after: 5s
pools:
  offload: {start: 10%}
rebalance:
  window: 3s
  step: 5%
  step_towards_safety: 10%
  cool_down: 2s
  cool_down_towards_safety: 1s
"""


class ManualClock:
    """Monotonic and Unix seconds; ``sleep`` moves both and notes how long it was asked for."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.set_by_s = 0.0
        """Seconds by which the wall clock was set."""
        self.slept: list[float] = []
        self.after_sleep: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now_s + self.set_by_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds
        self.after_sleep()


class FakeEngine:
    """Follows its commands at once, within its floor; failures are queued in ``trouble``."""

    def __init__(self) -> None:
        self.target = 0
        self.multiplier = 4.0
        self.order = AdmissionOrder.ARRIVAL
        self.max_running = 8
        self.in_use = 0
        self.cached = 0
        self.live_set_tokens = 0
        self.watermark = 100
        self.default_watermark = True
        self.report_trouble: list[Exception] = []
        self.apply_trouble: list[Exception] = []
        self.commands: list[EngineCommand] = []
        self.counters = ServingCounters()
        self.before_report: Callable[[], None] = lambda: None
        self.changes: dict[str, Any] = {}
        self.reserve, self.releasing = 0, False

    async def report(self) -> EngineReport:
        self.before_report()
        if self.report_trouble:
            raise self.report_trouble.pop(0)
        capacity = BUDGET - self.target - self.reserve
        report = EngineReport(
            geometry=GEOMETRY,
            hisparse=HiSparsePool(
                capacity_blocks=capacity,
                target_blocks=capacity,
                in_use_blocks=self.in_use,
                cached_blocks=self.cached,
                free_blocks=capacity - self.in_use - self.cached,
                ghost=(GhostPoint(10, 320),),
                floor_blocks=FLOOR,
            ),
            offload=OffloadPool(
                capacity_chunks=self.target * GEOMETRY.chunks_per_host_block,
                target_blocks=self.target,
                lent_blocks=self.target,
                in_use_chunks=10,
                stored_chunks=40,
                ghost=(GhostPoint(10, 0),),
            ),
            reserve=Reserve(self.reserve, self.reserve, True, self.releasing),
            pending_blocks=0,
            draining_blocks=0,
            head_need_blocks=0,
            gpu=GpuPool(400, 60, waiting_for_blocks=False, head_need_blocks=75),
            requests=Requests(
                running=3,
                waiting=1,
                preemptions_total=2,
                full=1,
                mixed=1,
                none=1,
                finished_total=9,
                held_back=0,
                oldest_wait_s=4.0,
                stalls_total=2,
                stalls_resolved_total=1,
                stalls_given_up_total=1,
            ),
            hot=HotBuffers(
                multiplier=self.multiplier,
                references_total=1_000,
                hits_total=540,
                loads_total=60,
                resident_total=400,
                h2d_bytes_total=76_800,
                lease_blocks=int(self.multiplier * 4),
                leased_requests=2,
                leased_blocks=64,
            ),
            sessions=LiveSet(self.live_set_tokens, 1 if self.live_set_tokens else 0),
            admission=AdmissionRules(self.order, 30.0, self.max_running, None, 10.0),
            watermark=Watermark(self.watermark, self.default_watermark),
            progress=Progress(7, 70),
            report_cost_s=0.0002,
            step_cpu=StepCpu(0.004, 0.009, 0.25),
        )
        return replace(report, **self.changes)

    async def apply(self, command: EngineCommand) -> ApplyResult:
        self.commands.append(command)
        if self.apply_trouble:
            raise self.apply_trouble.pop(0)
        if command.offload_target_blocks is not None:
            self.target = min(command.offload_target_blocks, BUDGET - FLOOR)
        if command.reserve_target_blocks is not None:
            self.reserve = command.reserve_target_blocks
        if command.release_reserve is not None:
            self.releasing = command.release_reserve
        if command.multiplier is not None:
            self.multiplier = command.multiplier
        if command.admission is not None:
            self.order = command.admission.order
            self.max_running = min(8, command.admission.max_running)
        if command.watermark is not None:
            self.default_watermark = command.watermark == "default"
            if isinstance(command.watermark, int):
                self.watermark = command.watermark
        return ApplyResult(
            offload_target_blocks=self.target,
            lent_blocks=self.target,
            reserve_target_blocks=self.reserve,
            reserve_blocks=self.reserve,
            multiplier=self.multiplier,
            lease_blocks=int(self.multiplier * 4),
            transition_watermark=self.watermark,
            admission_order=self.order,
            max_running=self.max_running,
            apply_us=50.0,
        )

    def serving(self) -> ServingCounters:
        return self.counters


class Node:
    """A control side with a fake engine. Files are below ``folder``, or ``state`` where given.

    Tests set what the rest of a daemon would show: ``lifecycle`` to ``on_tick``.
    """

    def __init__(self, folder: Path, policy: str = POLICY, state: Path | None = None) -> None:
        self.folder = folder
        self.policy_path = folder / "policy.yaml"
        self.policy_path.write_text(policy)
        self.clock = ManualClock()
        self.engine = FakeEngine()
        self.admissions: list[Any] = []
        self.lifecycle = Lifecycle.SERVING
        self.engine_status: EngineStatus | None = None
        self.canary: Callable[[], CanaryStatus | None] = lambda: None
        self.doctor: Callable[[], DoctorStatus | None] = lambda: None
        self.gpus: GpusStatus | None = None
        self.kernels: KernelsStatus | None = None
        self.background: list[BackgroundStatus] = []
        self.not_kept: Callable[[], list[str]] = list
        self.node_pending: tuple[PendingRestart, ...] = ()
        self.on_tick: list[OnTick] = []
        self.logged: list[str] = []
        info = NodeInfo(
            kind="reference",
            model="small",
            version="0.1.0",
            api_url="http://127.0.0.1:8000",
            pid=4242,
            started_unix_s=self.clock.wall() - 60,
        )
        monotonic, wall = self.clock.monotonic, self.clock.wall
        self.source = PolicySource(self.policy_path, clock=monotonic, wall_clock=wall)
        self.holds, self.broadcast = Holds(), Broadcast()
        writer = JournalWriter(
            state or folder / "state",
            run="run-1",
            clock=monotonic,
            stamp=lambda: "20260101T000000",
            log=self.logged.append,
        )
        self.journal = Journal(writer, run="run-1")
        self.recorder = EventRecorder(self.journal, self.broadcast, wall_clock=wall)
        self.operator = Operator(self.source, self.holds, self.recorder, wall_clock=wall)
        self.current = CurrentStatus(
            info,
            self.source,
            self.holds,
            self.journal,
            self.broadcast,
            StatusSources(
                lifecycle=lambda: self.lifecycle,
                engine=lambda: self.engine_status,
                canary=lambda: self.canary(),  # noqa: PLW0108 (tests replace it)
                doctor=lambda: self.doctor(),  # noqa: PLW0108 (tests replace it)
                gpus=lambda: self.gpus,
                kernels=lambda: self.kernels,
                background=lambda: self.background,
                not_kept=lambda: self.not_kept(),  # noqa: PLW0108 (tests replace it)
                node_pending=lambda: self.node_pending,
                on_tick=lambda: self.on_tick,
            ),
            clock=monotonic,
            wall_clock=wall,
        )
        self.metrics = ControlMetrics(self.current.status)
        self.api = ControlApi(
            self.current, self.operator, self.source, self.journal, self.broadcast
        )
        self.server = ControlServer(
            self.api.application(), folder / "control.sock", end_streams=self.broadcast.close
        )
        self.targets = TargetFile(state or folder)
        plane = ControlPlane(
            self.source,
            self.holds,
            self.journal,
            self.broadcast,
            self.recorder,
            self.current,
            self.metrics,
            clock=monotonic,
            wall_clock=wall,
            targets=self.targets,
        )
        self.loop = ControlLoop(
            self.engine, plane, sleep=self.clock.sleep, set_admission=self.admissions.append
        )

    async def open(self) -> None:
        """Serve the socket and write the journal."""
        await self.server.start()
        self.journal.start()

    async def close(self) -> None:
        await self.server.stop()
        self.journal.close()

    async def ticks(self, count: int) -> None:
        """Tick, with one second after each."""
        for _ in range(count):
            await self.loop.tick()
            self.clock.now_s += 1
