"""The record of a soak that was not clean: seed, settings, every move, what was wrong.

The same seed and settings give the same calls and moves at the same steps, so the record says
how to see it again and where to stop.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from hisparsed.soak.run import Soak


def save_record(soak: Soak, folder: Path | None = None) -> Path:
    """Write the record as JSON into ``folder`` (the system's for temporary files if not given)."""
    document = {
        "settings": {**asdict(soak.settings), "trace": str(soak.settings.trace)},
        "steps": soak.tally.steps,
        "violations": soak.tally.violations,
        "stuck": soak.tally.stuck,
        "differences": [asdict(one) for one in soak.differences],
        "moves": [asdict(one) for one in soak.moves_made],
        "report": soak.tally.last.model_dump() if soak.tally.last is not None else None,
    }
    handle, name = tempfile.mkstemp(prefix="hisparsed-soak-", suffix=".json", dir=folder)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
    return Path(name)
