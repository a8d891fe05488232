"""How many calls may run: a limit on admission alone since vLLM 0.31.

Before, the only limit was asserted against the calls that run already, so a lower one comes in
force as they end.
"""

from __future__ import annotations

from typing import Any


class ActiveLimit:
    """The limit of ``scheduler``, vLLM's, which begins at the configured one."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._admits_alone = hasattr(scheduler, "max_num_active_reqs")
        name = "max_num_active_reqs" if self._admits_alone else "max_num_running_reqs"
        self.configured = int(getattr(scheduler, name))
        self._most = self.configured

    @property
    def most(self) -> int:
        """Calls that may run at once; more may still be running from before."""
        return int(self._scheduler.max_num_active_reqs) if self._admits_alone else self._most

    def set(self, most: int) -> None:
        self._most = most
        if self._admits_alone:
            self._scheduler.max_num_active_reqs = most

    def before_pass(self) -> None:
        """To be called before each scheduling pass."""
        if not self._admits_alone:
            running = len(self._scheduler.running)
            self._scheduler.max_num_running_reqs = max(self._most, running)
