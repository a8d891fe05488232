"""Hot buffers of vLLM's own executor: what the control method asks, through worker calls.

The executor is vLLM's, never a subclass of it. Figures are fetched without waiting for a step, so
they are those of the report before; rows are moved by every rank before any block goes back.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from hisparsed.engine.worker_report import HotRows, RowCurve, WorkerReport

log = logging.getLogger("hisparsed.engine")

_FIGURES = "hisparsed_hot_figures"
_RESIZE = "hisparsed_resize_hot"
_DOUBT = "hisparsed_doubt_hot"


class CudaHot:
    """``executor``: any of vLLM's, whose workers have ``HotExtension``.

    Worker calls have no time limit: a late reply would be taken for the next call's. The work of a
    call is bounded instead, and vLLM notices a dead worker itself.
    """

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._asked: Any = None
        self._late = False
        self._report = WorkerReport(counted=False)
        self._rows: dict[str, HotRows] = {}

    def hot_report(self) -> WorkerReport:
        """Figures of the call before; ``counted`` is false until there are some.

        Raises ``RuntimeError`` when the workers did not know.
        """
        if self._asked is not None and (self._asked.done() or self._late):
            # A call that is late for two reports is waited for: an idle engine takes no replies.
            self._asked, asked = None, self._asked
            self._take(asked.result())
        self._late = self._asked is not None
        if self._asked is None:
            self._asked = self._executor.collective_rpc(_FIGURES, non_block=True)
        return self._report

    def _take(self, answers: list[dict[str, Any] | None]) -> None:
        # Ranks differ at most where several tokens tie for the last place of a top-k.
        found = answers[0]
        if found is None:
            return
        curves: Mapping[str, RowCurve] = found["request_curves"]
        self._report = WorkerReport(
            counters=found["counters"], miss_curve=found["miss_curve"], request_curves=curves
        )
        self._rows = {name: HotRows(*numbers) for name, numbers in found["rows"].items()}

    def hot_rows(self) -> dict[str, HotRows]:
        """Each request's hot buffer as of the newest figures."""
        return self._rows

    def resize_hot(self, leases: dict[str, int]) -> None:
        """Shrink hot buffers on all ranks; their blocks may go back afterwards.

        Raises ``RuntimeError`` when ranks shrank different requests; the engine ends with the
        next step then. How many rows they moved may differ: each knows where its own lie, and
        top-k kernels may break a tie differently on every GPU.
        """
        answers = self._executor.collective_rpc(_RESIZE, args=(leases,))
        shrunk = [requests for requests, _ in answers]
        if len(set(shrunk)) > 1:
            reason = (
                f"ranks shrank the hot buffers of {shrunk} requests, all must shrink the same; "
                "the engine must be restarted"
            )
            self._executor.collective_rpc(_DOUBT, args=(reason,))
            raise RuntimeError(reason)
        rows = [moved for _, moved in answers]
        log.debug("Shrank %d hot buffers, %s rows moved by rank.", shrunk[0], rows)
