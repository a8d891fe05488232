"""Watches the ledger while the engine serves, and stops all moves on a violation.

Every look checks the counters and a bounded slice of blocks, so the whole pool is walked once
in a while at no cost that shows. A violation freezes the ledger where it is: requests are
served on, no block changes its tenant. Only ``clear`` ends that, and only when a check
of everything finds nothing.
"""

from __future__ import annotations

from hisparsed.engine.invariants import Violation, violations
from hisparsed.engine.ledger import HostLedger
from hisparsed.engine.picture import LedgerCamera

_SLICE_COST = 64
"""Weight of the blocks of one look; about 25 microseconds."""
_KEPT = 8
"""Violations that are kept for the report; the count goes on."""


class LedgerWatch:
    """One engine's. ``total`` counts violations, each once while it lasts; never goes back."""

    def __init__(self, ledger: HostLedger, camera: LedgerCamera) -> None:
        self._ledger = ledger
        self._camera = camera
        self._next_block = 0
        self.found: tuple[Violation, ...] = ()
        self.total = 0

    def look(self) -> None:
        """Check the counters and the next few blocks."""
        picture, self._next_block = self._camera.of_blocks(self._next_block, _SLICE_COST)
        self._judge(violations(picture))

    def look_at_everything(self) -> list[Violation]:
        """Check every block and all owners; freezes on a violation, too."""
        found = violations(self._camera.of_everything())
        self._judge(found)
        return found

    def require_sound(self) -> None:
        """Raises ``ValueError`` naming the violation while the ledger is frozen."""
        if self.found:
            more = f" and {self.total - 1} more" if self.total > 1 else ""
            raise ValueError(
                f"levers are frozen: the host ledger broke {self.found[0].rule} "
                f"({self.found[0].sentence}{more}); thaw them when the cause is known"
            )

    def clear(self) -> None:
        """End the freeze if everything is sound now. Raises ``ValueError`` when it is not."""
        found = violations(self._camera.of_everything())
        if found:
            self._judge(found)
            self.require_sound()
        self.found = ()
        self._ledger.frozen = False

    def _judge(self, found: list[Violation]) -> None:
        if not found:
            return
        self._ledger.frozen = True
        known = {one.rule for one in self.found}
        new = [one for one in found if one.rule not in known]
        self.total += len(new)
        self.found = (*self.found, *new)[:_KEPT]
