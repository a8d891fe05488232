"""Chooses the kernels that an engine starts with, and notes their faults while it runs.

Asked before each start. After an engine with hisparsed's kernels answers its canary wrong, or ends
with an error of a kernel, the next starts on this machine use vLLM's. Only if ``cuda.kernels`` is
auto; else the document decides.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from hisparsed.control.events import EventRecorder
from hisparsed.control.status.current import TickOutcome
from hisparsed.control.status.document import CanaryState, CanaryStatus
from hisparsed.engine.cuda.proof.choose import (
    AROUND,
    Around,
    choose_kernels,
    kernels_status,
    with_kernels,
)
from hisparsed.engine.cuda.proof.kept import KeptProofs
from hisparsed.engine.cuda.proof.verdict import HotVerdict
from hisparsed.engine.kernel_choice import KernelReason, KernelsStatus
from hisparsed.errors import UserError
from hisparsed.logs.ring import LogLine
from hisparsed.node.engine.values import EngineValues
from hisparsed.policy.events import EventKind

log = logging.getLogger("hisparsed.daemon")

_KERNEL_ERROR = re.compile(
    r"hot buffers are in doubt[^\n]*|CUDA error: (?:an illegal|misaligned|device-side|unspecified "
    r"launch|invalid)[^\n]*|Triton Error[^\n]*|\w*[Cc]apacity \d+ needs \d+ hot blocks[^\n]*"
)
"""An error of a kernel in the engine's log; not an out-of-memory error or a lost GPU."""


def kernel_error(lines: Iterable[LogLine], since_unix_s: float) -> str | None:
    """The first error of a kernel that the engine has logged since then; ``None`` without one."""
    for line in lines:
        if line.source == "engine" and line.at_unix_s >= since_unix_s:
            found = _KERNEL_ERROR.search(line.text)
            if found is not None:
                return found.group(0)[:300]
    return None


@dataclass(frozen=True)
class Settled:
    """The launch values of an engine once its kernels are chosen."""

    values: EngineValues
    lends: bool = True
    """Whether the offload pool may have blocks."""


class KernelKeeper:
    """For a CUDA node; lives as long as the daemon. ``wall_clock`` is Unix seconds; ``canary`` is
    that of the engine that runs."""

    def __init__(
        self,
        state_dir: Path,
        recorder: EventRecorder,
        canary: Callable[[], CanaryStatus | None],
        *,
        wall_clock: Callable[[], float],
        around: Around = AROUND,
    ) -> None:
        self._kept = KeptProofs(state_dir)
        self._recorder = recorder
        self._canary = canary
        self._wall_clock = wall_clock
        self._around = around
        self._began_unix_s = wall_clock()
        self._status: KernelsStatus | None = None

    def status(self) -> KernelsStatus | None:
        """Of the latest start; ``None`` before the first."""
        return self._status

    async def settle(self, values: EngineValues) -> Settled:
        """Choose the kernels, run the proof if no answer is kept, and report the result. Takes
        seconds at most.

        Raises ``UserError`` where the model cannot be read.
        """
        self._began_unix_s = self._wall_clock()
        status = await self._choose(values)
        self._status = status
        self._report(status)
        if status.asked == "auto":
            config = with_kernels(values.config, status.used)
            most = values.max_multiplier
            if status.used == "hisparsed" and values.proved_multiplier is not None:
                most = values.proved_multiplier
            values = replace(values, config=config, max_multiplier=most)
        return Settled(values, lends=status.offload_trusted)

    async def _choose(self, values: EngineValues) -> KernelsStatus:
        try:
            return await choose_kernels(
                values.config,
                self._kept,
                start_multiplier=values.max_multiplier,
                most_multiplier=values.proved_multiplier or values.max_multiplier,
                around=self._around,
            )
        except UserError:
            raise
        except Exception as error:
            log.exception(
                "The check of kernels and copies failed; hisparsed's kernels and copies "
                "are not used."
            )
            why = f"the proof failed in the daemon: {type(error).__name__}: {error}"
            verdict = HotVerdict(KernelReason.UNPROVED, why)
            auto = values.config.cuda.kernels == "auto"
            return kernels_status(values.config, verdict if auto else None, why, None)

    def _report(self, status: KernelsStatus) -> None:
        if status.reason is not KernelReason.CONFIGURED:
            fell_back = status.reason.fell_back
            kind = EventKind.KERNELS_FELL_BACK if fell_back else EventKind.KERNELS_PROVED
            self._recorder.event(kind, f"{status.sentence}.")
        if not status.offload_trusted:
            self._recorder.event(EventKind.OFFLOAD_UNPROVED, f"{status.offload_sentence}.")

    # --- while an engine runs -----------------------------------------------------------

    def watch(self, _outcome: TickOutcome) -> None:
        """Call after ticks: after a canary mismatch hisparsed's kernels are not used again."""
        canary = self._canary()
        if canary is not None and canary.state is CanaryState.MISMATCH:
            self._doubt(f"the canary gave a different answer with them: {canary.sentence}")

    def engine_ended(self, lines: Iterable[LogLine]) -> None:
        """An engine died or did not start; ``lines`` are the latest of the log."""
        error = kernel_error(lines, self._began_unix_s)
        if error is not None:
            self._doubt(f"an engine that ran them ended with: {error}")

    def _doubt(self, why: str) -> None:
        status = self._status
        if status is None or status.reason is not KernelReason.PROVED:
            return
        self._kept.put_doubt(f"hisparsed's kernels are no longer used, {why}", self._wall_clock())
        self._status = status.model_copy(
            update={
                "reason": KernelReason.DISTRUSTED,
                "sentence": f"{status.sentence}; no longer used, {why}",
            }
        )
        self._recorder.event(
            EventKind.KERNELS_FELL_BACK,
            f"hisparsed's kernels are no longer used, {why}. The next engine starts with vLLM's.",
        )
