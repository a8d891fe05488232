"""Why a lever moves, and why it does not: stable codes for journal, metrics and operators.

A code never changes its meaning; new situations get new codes. The figures and the sentence
that go with a code belong to the decision, not to this module.
"""

from __future__ import annotations

from enum import StrEnum


class Lever(StrEnum):
    """What the policy can change live."""

    SPLIT = "split"
    MULTIPLIER = "multiplier"
    ADMISSION = "admission"
    WATERMARK = "watermark"


class Reason(StrEnum):
    """Acting codes first, holding codes after; ``ACTING`` tells them apart."""

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
    NO_TRAFFIC = "NoTraffic"
    NO_BENEFIT = "NoBenefit"
    FROZEN = "Frozen"
    ADVISE_ONLY = "AdviseOnly"
    OFF = "Off"
    STALE = "Stale"
    STALLED = "Stalled"
    MISSING_SIGNAL = "MissingSignal"
    PENDING_RESTART = "PendingRestart"

    @property
    def acts(self) -> bool:
        """Whether a decision with this reason changes something."""
        return self in ACTING


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
