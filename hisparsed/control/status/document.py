"""The status document: one node at one moment, for the API, the command line and the terminal view.

Models without behaviour. Bytes are bytes, times are seconds, ``None`` is not known yet.
``observed`` is the snapshot of the last tick, ``derived`` the figures computed from it; ``engine``
is the state of the engine, which the supervisor fills; ``doctor`` has the findings of the machine's
checks.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from hisparsed.control.journal.records import EventView
from hisparsed.engine.cuda.nvml import GpusStatus
from hisparsed.engine.kernel_choice import KernelsStatus
from hisparsed.engine.messages import Residency
from hisparsed.policy.decisions import Reason
from hisparsed.policy.derived import Derived
from hisparsed.policy.keys import PendingRestart
from hisparsed.policy.schedules import Override
from hisparsed.policy.schema import Mode
from hisparsed.policy.signals import Lever, Snapshot


class Severity(StrEnum):
    """From best to worst."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing to do."""
    WARNING = "warning"
    FATAL = "fatal"
    """A node must not start like this."""


class DoctorFinding(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    check: str
    """A stable name for scripts, such as `memlock`."""
    severity: Severity
    what: str
    why: str = ""
    fix: str = ""
    seen_unix_s: float
    """When it was last checked; what cannot change while a node runs is checked before its start
    only."""


class DoctorStatus(BaseModel):
    """``findings`` are those with a fault, the worst first."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at_unix_s: float
    """When the doctor last ran."""
    looking: bool = False
    error: str | None = None
    """Why the last run failed; the findings are then those of the previous one."""
    checks: int
    """The number of findings, also those without a fault."""
    fatal: int
    warnings: int
    findings: list[DoctorFinding]


class EngineState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    """Open calls end, new ones are refused; then the engine is stopped."""
    RESTARTING = "restarting"
    """No engine: one is being stopped, or the daemon waits for the next try."""
    FAILED = "failed"
    """Given up; the daemon ends."""
    STOPPED = "stopped"
    """Asked to stop; the rest of the engine is being stopped."""


class _EnginePart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class EngineEnd(_EnginePart):
    """An engine that ended, or did not start, without being asked to."""

    at_unix_s: float
    why: str
    processes: list[str] = []
    """Those of the engine, each with how it ended."""
    evidence: str | None = None
    """The file with the evidence."""


class QuarantinedValues(_EnginePart):
    """Values that an engine did not start with, so the last good ones are in force."""

    at_unix_s: float
    error: str
    changes: list[PendingRestart]
    """The difference to those that are in force."""


class EngineStatus(_EnginePart):
    state: EngineState
    since_unix_s: float
    sentence: str
    """All of it for people."""
    died_total: int = 0
    """Engines of this daemon that ended unasked."""
    restarts_total: int = 0
    """Engines that served after the first."""
    planned_restarts_total: int = 0
    ends_in_window: int = 0
    """Ends and failed starts that count towards `supervision.most_restarts`."""
    most_restarts: int = 0
    last_start_s: float | None = None
    """How long the last start took."""
    next_try_unix_s: float | None = None
    last_exit: EngineEnd | None = None
    quarantined: QuarantinedValues | None = None
    """Set while the documents have values that did not start."""


class Lifecycle(StrEnum):
    """The phase of the daemon."""

    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"
    """The engine is being restarted; ``engine`` of the status document says more."""
    DRAINING = "draining"
    ENGINE_GONE = "engine-gone"
    STOPPED = "stopped"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NodeInfo(_Part):
    """Values that do not change while the daemon runs."""

    name: str = ""
    """The node's name for people: the machine's name and the port of its API."""
    kind: str
    """cuda, reference or simulated."""
    model: str
    version: str
    api_url: str
    pid: int
    started_unix_s: float


class LeverStatus(_Part):
    """The last decision on one lever."""

    lever: Lever
    mode: Mode
    frozen: bool
    pending_restart: bool
    current: float | str
    wanted: float | str
    reason: Reason
    limited_by: Reason | None
    sentence: str


class ScheduleStatus(_Part):
    name: str
    active: bool


class PolicyStatus(_Part):
    path: str
    generation: int
    content_hash: str
    mode: Mode
    """That of the policy in force."""
    effective: str = ""
    """What the levers may do now, modes and freezes together: `act`, `advise`, `frozen 2/4`."""
    overridden: dict[Lever, Mode]
    """Modes that an operator set above the document."""
    frozen: list[Lever]
    reload_failures: int
    last_error: str | None
    overrides: list[Override] = []
    """Values that operators set above the document, oldest first."""
    schedules: list[ScheduleStatus] = []
    pending_restart: list[PendingRestart] = []
    """Values that only a restart puts in force."""


class LoopStatus(_Part):
    tick: int
    tick_s: float
    """Time between two ticks, as the policy sets it."""
    last_tick_s: float
    late_ticks: int
    """Ticks skipped because an earlier one took too long."""
    failed_applies: int
    failed_ticks: int
    """Ticks that ended early because of a bug in the daemon."""
    failed_reports: int = 0
    """Reports of the engine that failed."""


class JournalStatus(_Part):
    writing: bool
    error: str | None
    written: int
    dropped: int


class CanaryState(StrEnum):
    OFF = "off"
    WAITING = "waiting"
    """No round has ended yet."""
    LEARNING = "learning"
    """Rounds were clean, but too few to know this node's rounding."""
    OK = "ok"
    SUSPECT = "suspect"
    """An answer that may be rounding or corruption; it is asked again soon."""
    MISMATCH = "mismatch"
    """An answer differed; stays until a requested round is clean."""
    FAILED = "failed"
    """The last round did not end, so nothing is known of it."""


class CanaryRun(_Part):
    """One question of a round. Steps are decode steps, by the residency they were made in."""

    asked: Residency
    recomputed: bool
    """No prefix was read: every row was written again."""
    equal: bool
    """Equal within rounding."""
    near_tie: bool = False
    """A different token, where two were so close that rounding explains it."""
    distance: float = 0.0
    """Distance from the baseline, in units of this node's noise."""
    prefix_hit_tokens: int
    steps_full: int
    steps_mixed: int
    steps_none: int
    scheduled_tokens: int
    step_s: float


class CanaryStatus(_Part):
    """The node's own request whose answer must never change. Totals are of this engine."""

    state: CanaryState
    sentence: str
    not_ready: bool = False
    """Whether `/readyz` answers 503, as the policy requires after a mismatch."""
    running: bool = False
    rounds_total: int = 0
    mismatches_total: int = 0
    """Rounds with an answer that differed."""
    suspects_total: int = 0
    """Rounds that were repeated before any action."""
    noise: float | None = None
    """Natural units of log probability by which clean answers differ; ``None`` while unknown."""
    failed_total: int = 0
    left_out_total: int = 0
    """Rounds skipped because the node was overloaded."""
    last_unix_s: float | None = None
    last_trigger: str | None = None
    prompt_tokens: int = 0
    answer_tokens: int = 0
    scheduled_tokens_total: int = 0
    step_seconds_total: float = 0.0
    """Its share, by tokens, of the time of its steps."""
    share_of_time: float = 0.0
    last_round: list[CanaryRun] = []
    evidence: str | None = None
    """The file of the last mismatch."""


class BackgroundStatus(_Part):
    """One task of the daemon, such as the file watch."""

    name: str
    running: bool = True
    """Whether it runs now; else it restarts soon."""
    failures_total: int = 0
    """Times that a bug in the daemon ended it."""


class Status(_Part):
    schema_version: int = 2
    at_unix_s: float
    node: NodeInfo
    lifecycle: Lifecycle
    observed: Snapshot | None
    """The last tick's snapshot without the hot buffers of single requests; ``None`` before the
    first report and while there is no engine. ``report_age_s`` is of now."""
    derived: Derived | None = None
    """Figures computed from ``observed``."""
    levers: list[LeverStatus]
    policy: PolicyStatus
    loop: LoopStatus
    journal: JournalStatus
    last_sentence: str | None
    last_sentence_unix_s: float | None
    events: list[EventView]
    """The latest few, newest first."""
    stalled: str | None = None
    """The sentence for calls that make no progress although memory is free; ``None`` when they
    progress.
    """
    canary: CanaryStatus | None = None
    """``None`` until there is an engine to ask."""
    doctor: DoctorStatus | None = None
    """``None`` without a doctor."""
    engine: EngineStatus | None = None
    """The engine's state; ``None`` if it is not supervised."""
    gpus: GpusStatus | None = None
    """As NVML reports; ``None`` on other than CUDA nodes, and before the first reading."""
    kernels: KernelsStatus | None = None
    """Whose kernels find rows in hot buffers, and why; ``None`` on other than CUDA nodes, and
    before the first start."""
    not_kept: list[str] = []
    """Small files of the state folder that cannot be written now, each with the reason."""
    background: list[BackgroundStatus] = []
    """A background task that runs as long as the daemon."""
