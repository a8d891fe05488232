"""The result of a tick: a decision with its reason for every lever, and the command to apply.

Reason codes are stable, for the journal, metrics and operators: a code never changes its meaning,
and new situations get new codes. Levers make proposals; modes, freezes and restarts turn them into
decisions in ``decide``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from hisparsed.policy.forecasts import Figures, Outcome, Setting
from hisparsed.policy.signals import AdmissionRules, Lever


class Reason(StrEnum):
    """Acting codes first, holding codes after; ``ACTING`` distinguishes them."""

    OFFLOAD_SHORT_OF_REACH = "OffloadShortOfReach"
    OFFLOAD_BEYOND_REACH = "OffloadBeyondReach"
    FIXED_SPLIT = "FixedSplit"
    OFFLOAD_WORTH_MORE = "OffloadWorthMore"
    HISPARSE_WORTH_MORE = "HisparseWorthMore"
    OUTSIDE_BOUNDS = "OutsideBounds"
    GPU_POOL_PRESSURE = "GpuPoolPressure"
    ROOM_TO_GROW = "RoomToGrow"
    FEWER_MISSES_PAY = "FewerMissesPay"
    SHARED_BY_GAIN = "SharedByGain"
    COVERAGE_LOW = "CoverageLow"
    COVERAGE_RECOVERED = "CoverageRecovered"
    QUEUE_CHANGED = "QueueChanged"
    POLICY_VALUE = "PolicyValue"

    IN_DEAD_BAND = "InDeadBand"
    AT_TARGET = "AtTarget"
    WINDOW_NOT_FULL = "WindowNotFull"
    COOLING_DOWN = "CoolingDown"
    HOLD_OFF = "HoldOff"
    BACKED_OFF = "BackedOff"
    SETTLING = "Settling"
    LIMITED_BY_IN_USE = "LimitedByInUse"
    LIMITED_BY_FLOOR = "LimitedByFloor"
    LIMITED_BY_CEILING = "LimitedByCeiling"
    LIMITED_BY_STEP = "LimitedByStep"
    LIMITED_BY_PCIE = "LimitedByPcie"
    MISSES_OUTWEIGH = "MissesOutweigh"
    NOT_KV_PRESSURE = "NotKVPressure"
    PREFILL_BOUND = "PrefillBound"
    ENGINE_CORE_BOUND = "EngineCoreBound"
    NO_TRAFFIC = "NoTraffic"
    NO_BENEFIT = "NoBenefit"
    FROZEN = "Frozen"
    ADVISE_ONLY = "AdviseOnly"
    OFF = "Off"
    STALE = "Stale"
    STALLED = "Stalled"
    MISSING_SIGNAL = "MissingSignal"
    PENDING_RESTART = "PendingRestart"
    UNPROVED = "Unproved"

    @property
    def acts(self) -> bool:
        """Whether a decision with this reason changes something."""
        return self in ACTING

    @property
    def shown_in_mode(self) -> str:
        """The mode of a lever that decides with this reason: act, advise or off; empty where any
        could."""
        if self.acts:
            return "act"
        return {Reason.ADVISE_ONLY: "advise", Reason.OFF: "off"}.get(self, "")


def reason_of(code: object) -> Reason | None:
    """``None`` where this version does not know the code."""
    return Reason(code) if isinstance(code, str) and code in _CODES else None


_CODES = frozenset(Reason)
ACTING = frozenset(
    {
        Reason.OFFLOAD_SHORT_OF_REACH,
        Reason.OFFLOAD_BEYOND_REACH,
        Reason.FIXED_SPLIT,
        Reason.OFFLOAD_WORTH_MORE,
        Reason.HISPARSE_WORTH_MORE,
        Reason.OUTSIDE_BOUNDS,
        Reason.GPU_POOL_PRESSURE,
        Reason.ROOM_TO_GROW,
        Reason.FEWER_MISSES_PAY,
        Reason.SHARED_BY_GAIN,
        Reason.COVERAGE_LOW,
        Reason.COVERAGE_RECOVERED,
        Reason.QUEUE_CHANGED,
        Reason.POLICY_VALUE,
    }
)


def effective_text(levers: Iterable[tuple[str, bool]]) -> str:
    """What the levers may do now, from each one's mode and whether it is frozen.

    One word where all may do the same (`act`, `advise`, `off`, `frozen`); else those that are held
    back with their counts (`advise 1/4, frozen 2/4`). Empty where the modes are not known.
    """
    states = Counter("frozen" if frozen and mode != "off" else mode for mode, frozen in levers)
    total = states.total()
    if len(states) == 1:
        return next(iter(states))
    return ", ".join(
        f"{state} {states[state]}/{total}" for state in ("advise", "off", "frozen") if states[state]
    )


@dataclass(frozen=True, slots=True)
class Proposal:
    """The proposal of a lever's law and guards, before modes; ``wanted == current`` holds."""

    lever: Lever
    current: Setting
    wanted: Setting
    reason: Reason
    limited_by: Reason | None
    figures: Mapping[str, float]
    action: str
    """Imperative, with both values: what acting would do, or what holding keeps."""
    because: str
    """A clause that follows "because"."""
    expected: Figures = field(default_factory=dict)
    """Expected results of the move; empty where the law predicts none."""


@dataclass(frozen=True, slots=True)
class LeverDecision:
    """One lever, one tick. ``figures`` support the reason, with units in their names.

    ``reason`` is final; ``cause`` is the law's reason if a mode, a freeze or a pending restart kept
    it from acting, and equals ``reason`` otherwise.
    """

    lever: Lever
    current: Setting
    wanted: Setting
    limited_by: Reason | None
    reason: Reason
    cause: Reason
    figures: Mapping[str, float]
    sentence: str
    expected: Figures = field(default_factory=dict)
    """Expected results, where the lever moves."""
    outcome: Outcome | None = None
    """Of an earlier move, in the tick in which it is judged."""

    @property
    def acts(self) -> bool:
        return self.reason.acts


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """What to change now; ``None`` leaves a lever alone. Pool targets are given together.

    The engine applies it between two steps, all or nothing. Raises ``ValueError`` naming a value
    that is wrong on every node.
    """

    offload_target_blocks: int | None = None
    hisparse_target_blocks: int | None = None
    """The blocks that the other targets leave to HiSparse."""
    reserve_target_blocks: int | None = None
    release_reserve: bool | None = None
    """Whether the node gives the memory of reserve blocks back, now and from now on."""
    multiplier: float | None = None
    """Hot rows of a lease / top-k, with drafts as without."""
    hot_leases: Mapping[str, int] | None = None
    """Hot blocks of one group by request, for nodes that report requests; others keep their size.
    Unknown requests are ignored: they have ended. Empty: all go back to the multiplier's."""
    watermark: int | Literal["default"] | None = None
    admission: AdmissionRules | None = None
    """The engine enforces order, ageing and the limit on running requests, the API the rest."""
    clear_violations: bool = False
    """Check the whole ledger; if it is sound, levers work again. Refused if it is not."""

    def __post_init__(self) -> None:
        for name in ("offload_target_blocks", "reserve_target_blocks"):
            blocks = getattr(self, name)
            if blocks is not None and blocks < 0:
                raise ValueError(f"{name} is {blocks}; it must be at least 0")
        if self.multiplier is not None and not self.multiplier > 0:
            raise ValueError(f"multiplier is {self.multiplier}; it must be above 0")

    def __bool__(self) -> bool:
        return self != EngineCommand()


@dataclass(frozen=True, slots=True)
class Decision:
    """Every lever's decision, in the order of ``Lever``, and the resulting command."""

    at_s: float
    tick: int
    policy_generation: int
    levers: tuple[LeverDecision, ...]
    commands: EngineCommand

    def of(self, lever: Lever) -> LeverDecision:
        return next(decision for decision in self.levers if decision.lever is lever)
