"""What the simulated node did so far: rows, bytes and busy seconds. Sums only."""

from __future__ import annotations

from dataclasses import dataclass

from hisparsed.engine.simulated.cost import CostModel, StepTime, StepWork
from hisparsed.engine.simulated.rows import RowCounts


@dataclass
class Tally:
    """Rows are distinct rows of a request's step in one index group; bytes are of one link."""

    steps: int = 0
    preemptions: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    compute_s: float = 0.0
    memory_s: float = 0.0
    gather_s: float = 0.0
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
