"""The folder of `--out`: used again by this command, and nothing of others is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from hisparsed.errors import UserError
from hisparsed.simulate.folder import begin_folder, check_folder


def written(folder: Path, runs: int = 2) -> list[Path]:
    """As a run of this command leaves it."""
    check_folder(folder)
    journals = begin_folder(folder, [f"policy {number}" for number in range(runs)])
    made = [journal for journal in journals if journal is not None]
    for journal in made:
        journal.mkdir()
        (journal / "journal.sqlite").write_text("ticks")
    for name in ("results.json", "report.html", "pools.png"):
        (folder / name).write_text("of this run")
    return made


def everything(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_a_folder_says_which_journal_is_whose(tmp_path: Path) -> None:
    written(tmp_path / "new" / "out")
    lines = (tmp_path / "new" / "out" / "journals.txt").read_text().splitlines()
    assert lines[1:] == ["journal-0  policy 0", "journal-1  policy 1"]


def test_a_run_without_a_journal_claims_none(tmp_path: Path) -> None:
    check_folder(tmp_path)
    assert begin_folder(tmp_path, [None, "policy"]) == [None, tmp_path / "journal-1"]
    (tmp_path / "journal-0").mkdir()
    with pytest.raises(UserError, match="journal-0 was not written by this command"):
        check_folder(tmp_path)


def test_used_again_it_keeps_nothing_of_the_run_before(tmp_path: Path) -> None:
    written(tmp_path, runs=3)
    (tmp_path / "notes.md").write_text("mine")
    check_folder(tmp_path)
    begin_folder(tmp_path, ["stock"])
    assert everything(tmp_path).keys() == {"notes.md", "journals.txt"}
    assert not list(tmp_path.glob("journal-*"))


@pytest.mark.parametrize(
    "strange",
    ["results.json", "report.html", "journals.txt", "journal-0/journal.sqlite", "journal-7/mine"],
)
def test_what_this_command_did_not_write_is_refused_and_stays(tmp_path: Path, strange: str) -> None:
    path = tmp_path / strange
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    with pytest.raises(UserError, match=r"--out: .* was not written by this command"):
        check_folder(tmp_path)
    assert everything(tmp_path) == {strange: "mine"}


def test_a_journal_beside_its_own_is_refused(tmp_path: Path) -> None:
    journals = written(tmp_path)
    (tmp_path / "journal-9").mkdir()
    with pytest.raises(UserError, match="journal-9 was not written by this command"):
        check_folder(tmp_path)
    (tmp_path / "journal-9").rmdir()
    (journals[0] / "notes.md").write_text("mine")
    with pytest.raises(UserError, match="journal-0 was not written by this command"):
        check_folder(tmp_path)


def test_a_list_that_points_elsewhere_removes_nothing(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "journal.sqlite").write_text("mine")
    out = tmp_path / "out"
    written(out)
    with (out / "journals.txt").open("a") as file:
        file.write("../other  policy\n")
    check_folder(out)
    begin_folder(out, ["stock"])
    assert everything(other) == {"journal.sqlite": "mine"}


def test_what_is_no_folder_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "below", Path("/proc/x/y")):
        with pytest.raises(UserError, match=f"--out: {path} cannot be a folder"):
            check_folder(path)


def test_a_folder_in_the_place_of_the_report_is_told(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "report.html").unlink()
    (tmp_path / "report.html").mkdir()
    with pytest.raises(UserError, match=r"report\.html is no file; move it"):
        check_folder(tmp_path)
