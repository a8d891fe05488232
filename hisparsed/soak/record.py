"""The record of a soak that was not clean: seed, settings, every move, what was wrong.

The same seed and settings give the same calls and moves at the same steps, so the record says
how to see it again and where to stop.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pydantic_core import to_json

from hisparsed.soak.run import Soak


def save_record(soak: Soak, folder: Path | None = None) -> Path:
    """Write the record of ``soak``; returns where it is."""
    return save_document(
        {
            "settings": soak.settings,
            "steps": soak.tally.steps,
            "violations": soak.tally.violations,
            "stuck": soak.tally.stuck,
            "differences": soak.differences,
            "moves": soak.moves_made,
            "report": soak.tally.last,
        },
        folder,
    )


def save_document(document: Mapping[str, object], folder: Path | None = None) -> Path:
    """Write JSON into ``folder`` (the system's for temporary files if not given)."""
    handle, name = tempfile.mkstemp(prefix="hisparsed-soak-", suffix=".json", dir=folder)
    with os.fdopen(handle, "wb") as file:
        file.write(to_json(document, indent=1))
    return Path(name)
