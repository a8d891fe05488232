"""The errors an operator is meant to read: printed as one clean line, with an exit code."""

from collections.abc import Sequence
from typing import ClassVar

EXIT_USER_ERROR = 2
"""Trying again would say the same."""
EXIT_ENGINE_GONE = 70
"""No engine could be kept running. The same may work another time."""


class UserError(Exception):
    """Something a person can put right: the message names place, value and what is right."""

    exit_code: ClassVar[int] = EXIT_USER_ERROR


class MachineShortError(UserError):
    """The machine lacks what the settings need, as it may not a moment later."""


class EngineStartError(UserError):
    """An engine whose settings were accepted did not start; the same may work another time.

    ``why`` is the reason alone, for those who say themselves that it did not start. ``processes``:
    how the engine's ended, in words. ``killed``: a signal ended one, not its own error.
    """

    exit_code = EXIT_ENGINE_GONE

    def __init__(self, why: str, *, processes: Sequence[str] = (), killed: bool = False) -> None:
        super().__init__(f"the engine did not start: {why}")
        self.why = why
        self.processes = tuple(processes)
        self.killed = killed
