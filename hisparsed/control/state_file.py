"""Writes the small files of the state folder, so that a crash leaves the old or the new one.

One mode for all of them: the group of the operators may read. The journal is not one of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hisparsed.whole_file import write_whole

STATE_FILE_MODE = 0o640
EVIDENCE_FOLDER_MODE = 0o750


def write_state_file(path: Path, data: bytes) -> None:
    """Replace ``path`` whole and for good. Raises ``OSError``; ``path`` is as it was then."""
    write_whole(path, data, mode=STATE_FILE_MODE, durable=True)


def save_evidence_file(
    folder: Path, prefix: str, at_unix_s: float, document: Mapping[str, Any], *, most: int
) -> Path:
    """Write one of at most ``most`` files, whole or not at all; the oldest go.

    Names have the time, and only rise: after a clock was set back, the newest would otherwise be
    taken for the oldest. Raises ``OSError``.
    """
    folder.mkdir(mode=EVIDENCE_FOLDER_MODE, exist_ok=True)
    before = sorted(folder.glob(f"{prefix}-*.json"))
    milliseconds = int(at_unix_s * 1000)
    if before:
        milliseconds = max(milliseconds, _number(before[-1]) + 1)
    path = folder / f"{prefix}-{milliseconds:015d}.json"
    write_state_file(path, json.dumps(document, indent=1).encode())
    for old in before[: max(0, len(before) + 1 - most)]:
        old.unlink(missing_ok=True)
    return path


def _number(path: Path) -> int:
    """0 where somebody else named the file."""
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isascii() and digits.isdecimal() else 0
