"""What a running node cannot take over: which keys of the policy, and how that is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class PendingRestart:
    """A value that only a restart puts in force; both as an operator writes them."""

    key: str
    running: str
    wanted: str


AT_START: Final = {
    "pools.hisparse.start": "at start; live with `rebalance.strategy: fixed`",
    "pools.offload.start": "at start; live with `rebalance.strategy: fixed`",
    "hot.start": "at start",
    "hot.max": "live up to what the engine was started with; more needs a restart",
}
"""When keys take effect that do not, or not always, at the next tick."""
