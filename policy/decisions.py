"""What comes out of a tick: one decision a lever, acting or not, and the commands to apply.

Levers make proposals; modes, freezes and restarts turn them into decisions in ``decide``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hisparsed.policy.reasons import Lever, Reason
from hisparsed.policy.signals import Admission

Setting: TypeAlias = int | float | str
"""Host blocks, a multiplier, GPU blocks, or the name of an order; each lever has its own."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a lever's law and guards say, before modes; ``wanted == current`` holds."""

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


@dataclass(frozen=True, slots=True)
class LeverDecision:
    """One lever, one tick. ``figures`` are what the reason rests on, units in their names.

    ``reason`` is final; ``cause`` is what the law said before a mode, a freeze or a pending
    restart kept it from acting, and equals ``reason`` otherwise.
    """

    lever: Lever
    current: Setting
    wanted: Setting
    limited_by: Reason | None
    reason: Reason
    cause: Reason
    figures: Mapping[str, float]
    sentence: str

    @property
    def acts(self) -> bool:
        return self.reason.acts


@dataclass(frozen=True, slots=True)
class Commands:
    """What to change now; ``None`` leaves a lever alone. All pool targets come together."""

    offload_target_blocks: int | None = None
    hisparse_target_blocks: int | None = None
    reserve_target_blocks: int | None = None
    release_reserve: bool | None = None
    """Whether the node gives the memory of reserve blocks back; comes with the reserve."""
    multiplier: float | None = None
    hot_leases: Mapping[str, int] | None = None
    """Hot blocks of one group, a request; an empty mapping ends all leases of their own."""
    watermark: int | Literal["default"] | None = None
    admission: Admission | None = None

    def __bool__(self) -> bool:
        return self != Commands()


@dataclass(frozen=True, slots=True)
class Decision:
    """Every lever's decision, in the order of ``Lever``, and what follows from them."""

    at_s: float
    tick: int
    policy_generation: int
    levers: tuple[LeverDecision, ...]
    commands: Commands

    def of(self, lever: Lever) -> LeverDecision:
        return next(decision for decision in self.levers if decision.lever is lever)
