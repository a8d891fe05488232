"""What every control loop of one daemon works with; made once, it outlives engines.

``ControlLoop`` adds an engine to it. Nothing here is started.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hisparsed.control.events import Broadcast, EventRecorder
from hisparsed.control.holds import Holds
from hisparsed.control.journal.journal import Journal
from hisparsed.control.live_policy import PolicySource
from hisparsed.control.metrics.collector import ControlMetrics
from hisparsed.control.state_files import TargetFile
from hisparsed.control.status.current import CurrentStatus


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """``clock`` is monotonic seconds, ``wall_clock`` Unix seconds."""

    source: PolicySource
    holds: Holds
    journal: Journal
    broadcast: Broadcast
    recorder: EventRecorder
    status: CurrentStatus
    metrics: ControlMetrics
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    targets: TargetFile | None = None
    """Keeps what is in force over a restart; ``None`` where nothing is kept."""
