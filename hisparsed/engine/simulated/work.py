"""From a scheduled step to its work: contexts, selected rows, missed rows, and their sums.

``StepWorker`` adds up one step for the cost model. ``WorkTotals`` sums all steps: rows, bytes and
busy seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hisparsed.engine.simulated.cost import CostModel, RowCounts, RowModel, StepTime, StepWork
from hisparsed.engine.worker_report import RowCurve


@dataclass
class WorkTotals:
    """Rows are distinct rows of a request's step in one index group; bytes are of one link."""

    steps: int = 0
    preemptions: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    compute_s: float = 0.0
    memory_s: float = 0.0
    gather_s: float = 0.0
    core_s: float = 0.0
    gather_bytes: float = 0.0
    """All row reads."""
    loaded_bytes: float = 0.0
    """Those of decode steps."""
    selected: float = 0.0
    resident: float = 0.0
    hits: float = 0.0
    loads: float = 0.0
    spills: float = 0.0

    def rows(self, found: RowCounts) -> None:
        self.selected += found.selected
        self.resident += found.resident
        self.hits += found.hits
        self.loads += found.loads
        self.spills += found.spills

    def step(self, work: StepWork, time: StepTime, cost: CostModel) -> None:
        self.steps += 1
        self.tokens += work.tokens
        self.busy_s += time.total_s
        self.compute_s += time.compute_s
        self.memory_s += time.memory_s
        self.gather_s += time.gather_s
        self.core_s += time.core_s
        self.gather_bytes += cost.gather_bytes(work)
        self.loaded_bytes += cost.loaded_bytes(work)

    def counters(self, groups: int, stands_for: float) -> dict[str, int]:
        """As the resolvers of ``groups`` cache groups count them, on the whole node.

        A policy's limits are those of the whole node, so a scaled one reports for all of it.
        """
        many = groups * stands_for
        resident, hits = int(self.resident * many), int(self.hits * many)
        loads, spills = int(self.loads * many), int(self.spills * many)
        return {
            "references": resident + hits + loads + spills,
            "resident": resident,
            "hits": hits,
            "loads": loads,
            "spills": spills,
            "dropped": 0,
            "h2d_bytes": int(self.loaded_bytes * stands_for),
        }


CURVE_POINTS = 19
"""Points of the reported miss curves, a half top-k apart: 1x to 10x."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """Tokens of one request in one step: ``count`` from position ``start``."""

    request_id: str
    start: int
    count: int
    drafts: int
    length: int
    """Tokens known before the step, drafts omitted."""

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def emits(self) -> bool:
        """Whether the last known token is computed, so that the next can be sampled."""
        return self.end - self.drafts >= self.length

    @property
    def decodes(self) -> bool:
        return self.count == 1 + self.drafts


class RequestResidency(Protocol):
    """What the node's managers know of a running request."""

    def resident_share(self, request_id: str) -> float:
        """Share of its pages that are on the GPU."""
        ...

    def hot_rows(self, request_id: str) -> int:
        """Rows of its hot buffer in one group."""
        ...


class ManagersResidency:
    """``RequestResidency`` from vLLM's managers, one of each kind: all index groups move alike."""

    def __init__(self, resident: Any, hot: Any, block_tokens: int) -> None:
        self._resident = resident
        self._hot = hot
        self._block_tokens = block_tokens

    def resident_share(self, request_id: str) -> float:
        pages = len(self._resident.req_to_blocks.get(request_id, ()))
        if pages == 0:
            return 1.0
        return 1.0 - float(self._resident.host_only_pages.get(request_id, 0)) / pages

    def hot_rows(self, request_id: str) -> int:
        return len(self._hot.req_to_blocks.get(request_id, ())) * self._block_tokens


class AllResident:
    """``RequestResidency`` without HiSparse: all KV of a running request is on the GPU."""

    def resident_share(self, request_id: str) -> float:
        return 1.0

    def hot_rows(self, request_id: str) -> int:
        return 0


class StepWorker:
    """Adds up one step. ``topk`` rows are what attention reads for each token at most,
    ``chunk_tokens`` what the whole node computes of one prompt in a step."""

    def __init__(
        self,
        rows: RowModel,
        residency: RequestResidency,
        block_tokens: int,
        topk: int,
        chunk_tokens: int,
        locality_of: Callable[[str], float],
    ) -> None:
        self._rows = rows
        self._residency = residency
        self._block_tokens = block_tokens
        self._topk = topk
        self._chunk_tokens = chunk_tokens
        self._staged: dict[str, range] = {}
        """Positions of each prompt that the whole node would compute in the step that staged."""
        self._points = [half * topk // 2 for half in range(2, 2 + CURVE_POINTS)]
        self._locality_of = locality_of
        self._locality: dict[str, float] = {}
        self._from_host: dict[str, float] = {}
        """Rows from the host that each decoding request's latest step selected."""

    def of(self, segments: Sequence[StepPart], tally: WorkTotals) -> StepWork:
        tokens = 0
        context_tokens = selected_rows = decode_context = decode_rows = loaded = staged = 0.0
        for segment in segments:
            count, end = segment.count, segment.end
            tokens += count
            context_tokens += count * (end - count / 2)
            selected_rows += count * min(end, self._topk)
            if not segment.decodes:
                staged += self._stage(segment)
                continue
            decode_context += end
            found = self._rows.step(
                end,
                count,
                self._residency.resident_share(segment.request_id),
                self._residency.hot_rows(segment.request_id),
                self._locality_for(segment.request_id),
            )
            decode_rows += found.selected
            loaded += found.loads + found.spills
            tally.rows(found)
            self._from_host[segment.request_id] = found.selected - found.resident
        return StepWork(
            tokens,
            context_tokens,
            selected_rows,
            decode_context,
            decode_rows,
            loaded,
            len(segments),
            staged,
        )

    def _stage(self, segment: StepPart) -> float:
        """Rows from the host that a chunk of a prompt needs: all of its context that is not on
        the GPU, whatever its tokens select.

        A scaled node's chunks are shorter, so it has more of them for one of the whole node's.
        """
        if segment.start in self._staged.get(segment.request_id, range(0)):
            return 0.0
        until = segment.start + self._chunk_tokens
        self._staged[segment.request_id] = range(segment.start, until)
        missing = 1 - self._residency.resident_share(segment.request_id)
        return min(float(segment.start), segment.end * missing)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests that have ended."""
        for request_id in request_ids:
            self._from_host.pop(request_id, None)
            self._staged.pop(request_id, None)
            self._locality.pop(request_id, None)

    def _locality_for(self, request_id: str) -> float:
        found = self._locality.get(request_id)
        if found is None:
            found = self._locality[request_id] = self._locality_of(request_id)
        return found

    def miss_curve(self) -> tuple[tuple[int, float], ...]:
        """(hot rows, share of the selected host rows that misses) over all that decode; empty
        where none reads the host."""
        selected = sum(rows for rows in self._from_host.values() if rows >= 1)
        if not selected:
            return ()
        curves = self.request_curves(1).values()
        return tuple(
            (rows, sum(curve[index][1] for curve in curves) / selected)
            for index, rows in enumerate(self._points)
        )

    def request_curves(self, groups: int) -> dict[str, RowCurve]:
        """By request, (hot rows, rows that a step would load over all ``groups``)."""
        return {
            request_id: tuple(
                (rows, groups * from_host * self._misses(request_id, rows, from_host))
                for rows in self._points
            )
            for request_id, from_host in self._from_host.items()
            if from_host >= 1
        }

    def _misses(self, request_id: str, rows: int, from_host: float) -> float:
        return self._rows.misses(self._locality_for(request_id) * rows / from_host)
