"""What the daemon does when calls stand still though memory is free: tell, and perhaps restart.

Whether they stand still is the policy's judgement of a new report. An engine that does not report
is busy in one long step or hangs; that is told apart by time alone, and not here.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from pathlib import Path

from hisparsed.control.announce import Announcer
from hisparsed.control.board import TickOutcome
from hisparsed.control.records import EventKind
from hisparsed.control.state_file import write_state_file

log = logging.getLogger("hisparsed.daemon")

FILE_NAME = "restarts.json"
_WITHIN_S = 3600.0


class RestartFile:
    """When an engine was restarted because of a stall, kept over restarts; Unix seconds."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME

    def since(self, unix_s: float) -> list[float]:
        """Restarts from then on; none where the file is missing or cannot be understood."""
        try:
            kept = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read (%s); restarts begin to count anew.", self.path, error)
            return []
        times = kept if isinstance(kept, list) else []
        return [float(one) for one in times if isinstance(one, int | float) and one >= unix_s]

    def save(self, times: list[float]) -> None:
        """Replace the file. Raises ``OSError``."""
        write_state_file(self.path, json.dumps(times).encode())


class Standstill:
    """Call ``watch`` after each tick; ``restart`` gets what stands still, where that is wanted."""

    def __init__(
        self,
        announcer: Announcer,
        restarts: RestartFile,
        *,
        wall_clock: Callable[[], float],
        restart: Callable[[str], None],
    ) -> None:
        self._announcer = announcer
        self._restarts = restarts
        self._wall_clock = wall_clock
        self._restart = restart
        self._seen_report_s: float | None = None
        self._told = False

    def watch(self, outcome: TickOutcome) -> None:
        """Act on the first tick of a standstill, and on the first after it."""
        if outcome.reported_at_s == self._seen_report_s:
            return
        self._seen_report_s = outcome.reported_at_s
        if outcome.stalled is None:
            if self._told:
                self._told = False
                self._announcer.event(EventKind.STALL_ENDED, "Calls make progress again.")
            return
        if self._told:
            return
        self._told = True
        health = outcome.policy.health
        restart, what = False, "The node answers not ready until they move."
        if health.on_stall == "restart":
            restart, what = self._may_restart(health.most_restarts)
        self._announcer.event(
            EventKind.STALLED, f"{outcome.stalled[0].upper()}{outcome.stalled[1:]}. {what}"
        )
        if restart:
            self._restart(outcome.stalled)

    def _may_restart(self, most: int) -> tuple[bool, str]:
        now_s = self._wall_clock()
        # One that seems to come was made before somebody set the clock back: it counts as of now.
        found = self._restarts.since(now_s - _WITHIN_S)
        before = [min(one, now_s) for one in found]
        if before != found:
            with contextlib.suppress(OSError):  # what is counted stays in the file
                self._restarts.save(before)
        if len(before) >= most:
            return False, (
                f"The engine was restarted for that {len(before)} times within an hour, which is "
                "all that health.most_restarts allows, so it stays up and the node answers not "
                "ready."
            )
        try:
            self._restarts.save([*before, now_s])
        except OSError as error:
            # Without a count there is no cap, and a node that restarts for ever serves nobody.
            return False, (
                f"{self._restarts.path} cannot be written ({error.strerror or error}), so the "
                "engine stays up and the node answers not ready."
            )
        return True, "The engine is restarted."
