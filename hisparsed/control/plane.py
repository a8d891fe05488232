"""What every control loop of one daemon works with; made once, it outlives engines.

``ControlLoop`` adds an engine to it. Nothing here is started.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hisparsed.control.events import Announcer, Broadcast
from hisparsed.control.holds import Overrides
from hisparsed.control.journal.journal import Journal
from hisparsed.control.live_policy import PolicySource
from hisparsed.control.metrics.collector import ControlMetrics
from hisparsed.control.state_files import TargetFile
from hisparsed.control.status.current import CurrentStatus


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """``clock`` is monotonic seconds, ``wall_clock`` Unix seconds."""

    source: PolicySource
    overrides: Overrides
    journal: Journal
    broadcast: Broadcast
    announcer: Announcer
    status: CurrentStatus
    metrics: ControlMetrics
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    targets: TargetFile | None = None
    """Keeps what is in force over a restart; ``None`` where nothing is kept."""
