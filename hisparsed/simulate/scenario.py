"""What is simulated: node, traffic and time. Data only; imports no vLLM."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from hisparsed.config.node_description import NodeDescription
from hisparsed.errors import UserError
from hisparsed.policy.units import format_duration
from hisparsed.simulate.workload import Sessions


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of traffic; ``users`` are those of the whole node.

    Without ``users`` its sessions start when the trace started them, ``load`` times as fast.
    """

    sessions: Sessions
    users: int | None
    load: float = 1.0
    from_s: float = 0.0
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Scenario:
    """Node, traffic and time; bytes are those of the whole node.

    Raises ``UserError`` where the warm-up takes all of the time.
    """

    node: NodeDescription
    traffic: tuple[Traffic, ...]
    host_budget: int
    scale: Fraction = Fraction(1)
    duration_s: float = 3600.0
    warmup_s: float = 600.0
    think_scale: float = 1.0
    offload_prompt_only: bool = False
    max_model_len: int | None = None
    """The engine's limit, in tokens; ``None``: the longest call."""
    users: int | None = None
    """As asked for, of all traffic; results are listed under it and ``load``."""
    load: float | None = None
    """``None`` where nothing starts when a trace says."""

    def __post_init__(self) -> None:
        if self.warmup_s >= self.duration_s:
            raise UserError(
                f"--warmup: {format_duration(self.warmup_s)} leaves nothing to measure of --for "
                f"{format_duration(self.duration_s)}; give less"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest call."""
        return max(one.sessions.longest for one in self.traffic)
