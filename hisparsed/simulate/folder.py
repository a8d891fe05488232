"""The folder of `--out`: what this command wrote there before goes, what others wrote stays.

`journals.txt` says which journal is whose; a folder without it was not written by this command.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from hisparsed.errors import UserError
from hisparsed.simulate.plots import PLOT_FILES

LIST, RESULTS, REPORT = "journals.txt", "results.json", "report.html"
_FILES = (RESULTS, REPORT, *PLOT_FILES)
_TITLE = "Written by hisparsed simulate; each journal folder and its run.\n"
_JOURNAL = re.compile(r"journal-\d+", re.ASCII)
_JOURNAL_FILE = "journal.sqlite"


def check_folder(folder: Path) -> None:
    """Make ``folder``, changing nothing in it.

    Raises ``UserError`` where it cannot be made or holds what this command did not write.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = {path.name: path for path in folder.iterdir()}
    except OSError as error:
        raise UserError(
            f"--out: {folder} cannot be a folder ({error.strerror}); name one that is there or can "
            "be made"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"--out: {folder} cannot be written; name a folder that can")
    for name in (LIST, *_FILES):
        if name in there and (there[name].is_symlink() or not there[name].is_file()):
            raise UserError(f"--out: {there[name]} is no file; move it, or name another folder")
    ours = _listed(folder)
    for name, path in sorted(there.items()):
        strange = name in _FILES and ours is None
        if _JOURNAL.fullmatch(name):
            strange = name not in (ours or ()) or _is_foreign(path)
        if strange or (name == LIST and ours is None):
            raise UserError(
                f"--out: {path} was not written by this command; move it, or name another folder"
            )


def begin_folder(folder: Path, runs: Sequence[str | None]) -> list[Path | None]:
    """Remove what an earlier run of this command left; a place for the journal of each run.

    ``None`` is a run without a journal. Call ``check_folder`` before. Raises ``UserError``.
    """
    journals = {f"journal-{number}": run for number, run in enumerate(runs)}
    try:
        for name in _listed(folder) or ():
            journal = folder / name
            if journal.is_dir():
                for file in journal.iterdir():
                    file.unlink()
                journal.rmdir()
        for name in _FILES:
            (folder / name).unlink(missing_ok=True)
        lines = [f"{name}  {run}\n" for name, run in journals.items() if run is not None]
        (folder / LIST).write_text(_TITLE + "".join(lines), "utf-8")
    except OSError as error:
        raise UserError(f"--out: {folder} cannot be written: {error.strerror}") from None
    return [None if run is None else folder / name for name, run in journals.items()]


def _listed(folder: Path) -> list[str] | None:
    """Journals that this command wrote; ``None`` where it wrote nothing."""
    try:
        text = (folder / LIST).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if not text.startswith(_TITLE):
        return None
    first = [line.partition(" ")[0] for line in text.splitlines()[1:]]
    return [name for name in first if _JOURNAL.fullmatch(name)]


def _is_foreign(journal: Path) -> bool:
    """Whether something in it is no file of a journal."""
    if journal.is_symlink() or not journal.is_dir():
        return True
    return any(
        file.is_dir() or not file.name.startswith(_JOURNAL_FILE) for file in journal.iterdir()
    )
