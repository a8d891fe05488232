"""Watches a running engine: how long it has not reported, and whether its calls stall.

An engine that does not report is in one long step or hangs; time alone distinguishes these. Only
time in which the daemon was awake counts, so that an engine on a machine that slept is not taken
for one that hangs. Time in which the engine compiles kernels counts only beyond a high limit. The
policy judges from each new report whether calls stall; then an event is recorded and, if the policy
asks for it, the engine restarts, a limited number of times per hour.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from hisparsed.control.events import EventRecorder
from hisparsed.control.status.current import TickOutcome
from hisparsed.node.engine.records import RestartFile
from hisparsed.policy.events import EventKind

MOST_A_LOOK_S = 2.0
"""The most that one look adds; many times the interval between looks."""
ASK_AFTER_S = 1.0
"""After this long without a report, the watchdog checks whether the engine compiles."""
MOST_COMPILING_S = 1800.0
"""Between two reports; a compiler that runs for longer hangs."""


class ReportAge:
    """``now_s`` and ``reported_at_s`` are monotonic seconds. Call ``since_report_s`` often."""

    def __init__(self, now_s: float) -> None:
        self._looked_s = now_s
        self._reported_at_s = now_s
        self._age_s = self._compiled_s = 0.0

    def since_report_s(
        self, now_s: float, reported_at_s: float, compiles: Callable[[], bool] = lambda: False
    ) -> float:
        """Seconds without a report, without the time in which the daemon slept or kernels were
        compiled.

        ``compiles``: whether the engine does just now; asked where no report has come for a while.
        """
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        if reported_at_s != self._reported_at_s:
            self._reported_at_s, self._age_s, self._compiled_s = reported_at_s, 0.0, 0.0
            passed_s = min(passed_s, now_s - reported_at_s)
        passed_s = min(passed_s, MOST_A_LOOK_S)
        asks = self._age_s >= ASK_AFTER_S and self._compiled_s < MOST_COMPILING_S
        if asks and compiles():
            self._compiled_s += passed_s
        else:
            self._age_s += passed_s
        return self._age_s


_WITHIN_S = 3600.0


class StallWatchdog:
    """Call ``watch`` after each tick; ``restart`` is called with the stall, if the policy asks for
    it."""

    def __init__(
        self,
        recorder: EventRecorder,
        restarts: RestartFile,
        *,
        wall_clock: Callable[[], float],
        restart: Callable[[str], None],
    ) -> None:
        self._recorder = recorder
        self._restarts = restarts
        self._wall_clock = wall_clock
        self._restart = restart
        self._seen_report_s: float | None = None
        self._told = False

    def watch(self, outcome: TickOutcome) -> None:
        """Act in the first tick of a stall, and in the first tick after it."""
        if outcome.reported_at_s == self._seen_report_s:
            return
        self._seen_report_s = outcome.reported_at_s
        if outcome.stalled is None:
            if self._told:
                self._told = False
                self._recorder.event(EventKind.STALL_ENDED, "Calls make progress again.")
            return
        if self._told:
            return
        self._told = True
        health = outcome.policy.health
        restart, what = False, "The node answers not ready until they make progress."
        if health.on_stall == "restart":
            restart, what = self._may_restart(health.most_restarts)
        self._recorder.event(
            EventKind.STALLED, f"{outcome.stalled[0].upper()}{outcome.stalled[1:]}. {what}"
        )
        if restart:
            self._restart(outcome.stalled)

    def _may_restart(self, most: int) -> tuple[bool, str]:
        now_s = self._wall_clock()
        # A report from the future was made before the clock was set back: it is taken as made now.
        found = self._restarts.since(now_s - _WITHIN_S)
        before = [min(one, now_s) for one in found]
        if before != found:
            with contextlib.suppress(OSError):  # the counted restarts stay in the file
                self._restarts.save(before)
        if len(before) >= most:
            return False, (
                f"The engine was restarted for this {len(before)} times within an hour, the "
                f"maximum of health.most_restarts, so it stays up and the node answers not "
                "ready."
            )
        try:
            self._restarts.save([*before, now_s])
        except OSError as error:
            # Without a count there is no cap, and a node that restarts forever serves no client.
            return False, (
                f"{self._restarts.path} cannot be written ({error.strerror or error}), so the "
                "engine stays up and the node answers not ready."
            )
        return True, "The engine is restarted."
