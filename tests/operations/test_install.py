"""`hisparsed install`: where files go, what is never overwritten, and what systemd says of them."""

from __future__ import annotations

import configparser
import json
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hisparsed.errors import UserError
from hisparsed.operations.install import FileOutcome, InstallLayout, install_files

PROGRAM = Path(sys.executable).with_name("hisparsed")
UNIT = "etc/systemd/system/hisparsed.service"


def layout(root: Path, *, prefix: Path | None = None, systemd: int | None = None) -> InstallLayout:
    return InstallLayout(root=root, prefix=prefix, executable=PROGRAM, systemd_version=systemd)


def laid_out(root: Path, **options: object) -> dict[str, FileOutcome]:
    done = install_files(layout(root, **options), dry_run=False)  # type: ignore[arg-type]
    return {str(one.path): one.outcome for one in done}


def unit(root: Path) -> dict[str, list[str]]:
    """The settings of the unit; a name may have several values."""
    found: dict[str, list[str]] = {}
    for line in (root / UNIT).read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def test_the_administrators_files_go_to_etc(tmp_path: Path) -> None:
    done = laid_out(tmp_path)
    assert set(done.values()) == {FileOutcome.CREATED}
    for name in (
        UNIT,
        "etc/sysusers.d/hisparsed.conf",
        "etc/tmpfiles.d/hisparsed.conf",
        "etc/hisparsed/hisparsed.yaml",
        "etc/hisparsed/policy.yaml",
        "usr/local/share/hisparsed/policies/agentic.yaml",
        "usr/local/share/hisparsed/grafana/hisparsed.json",
        "usr/local/share/hisparsed/prometheus/alerts.yaml",
        "usr/local/share/hisparsed/kubernetes/hisparsed.yaml",
        "usr/local/share/hisparsed/fleet/vllm-router.service",
        "usr/local/share/hisparsed/fleet/vllm-router.env",
    ):
        assert (tmp_path / name).is_file(), name
        assert f"/{name}" in done, "what is said is what is done, without the root"


def test_a_packages_files_go_below_its_prefix_and_documents_to_etc(tmp_path: Path) -> None:
    laid_out(tmp_path, prefix=Path("/usr"))
    assert (tmp_path / "usr/lib/systemd/system/hisparsed.service").is_file()
    assert (tmp_path / "usr/lib/sysusers.d/hisparsed.conf").is_file()
    assert (tmp_path / "usr/share/hisparsed/policy.yaml").is_file()
    assert (tmp_path / "etc/hisparsed/policy.yaml").is_file()


def test_the_second_time_changes_nothing(tmp_path: Path) -> None:
    laid_out(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert set(laid_out(tmp_path).values()) == {FileOutcome.UNCHANGED}
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_an_edited_document_is_kept_and_an_old_unit_replaced(tmp_path: Path) -> None:
    laid_out(tmp_path)
    policy = tmp_path / "etc/hisparsed/policy.yaml"
    policy.write_text("mine")
    (tmp_path / UNIT).write_text("old")
    done = laid_out(tmp_path)
    assert done["/etc/hisparsed/policy.yaml"] is FileOutcome.KEPT
    assert policy.read_text() == "mine"
    assert done[f"/{UNIT}"] is FileOutcome.UPDATED
    assert unit(tmp_path)["Type"] == ["notify"]


def test_a_dry_run_says_the_same_and_writes_nothing(tmp_path: Path) -> None:
    said = install_files(layout(tmp_path), dry_run=True)
    assert list(tmp_path.iterdir()) == []
    assert said == install_files(layout(tmp_path), dry_run=False)


def test_files_are_for_all_to_read_and_nothing_half_written_stays(tmp_path: Path) -> None:
    laid_out(tmp_path)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert stat.S_IMODE(path.stat().st_mode) == 0o644
            assert path.suffix != ".new"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "etc").write_text("a file")
    with pytest.raises(UserError, match=r"etc/systemd/system/hisparsed\.service"):
        install_files(layout(tmp_path), dry_run=False)


@pytest.mark.parametrize(("version", "there"), [(None, False), (252, False), (254, True)])
def test_back_off_comes_with_a_systemd_that_knows_it(
    tmp_path: Path, version: int | None, there: bool
) -> None:
    laid_out(tmp_path, systemd=version)
    drop_in = tmp_path / "etc/systemd/system/hisparsed.service.d/back-off.conf"
    assert drop_in.exists() is there


def test_the_command_says_what_it_did_and_what_is_next(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hisparsed", "install", "--root", str(tmp_path)]
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"created    /{UNIT}" in first.stdout
    assert "systemctl enable --now hisparsed" in first.stdout
    again = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    outcomes = {one["outcome"] for one in json.loads(again.stdout)["files"]}
    assert outcomes == {"unchanged"}


def test_the_unit_runs_the_installed_program_and_keeps_its_promises(tmp_path: Path) -> None:
    laid_out(tmp_path)
    found = unit(tmp_path)
    assert found["ExecStart"] == [f"{PROGRAM} serve --config /etc/hisparsed/hisparsed.yaml"]
    assert found["ExecReload"] == [f"{PROGRAM} policy reload"]
    assert any(" doctor " in one and "--fatal-only" in one for one in found["ExecStartPre"])
    assert found["NotifyAccess"] == ["main"]
    assert found["KillMode"] == ["mixed"], "the engine would stop before the drain"
    assert found["LimitMEMLOCK"] == ["infinity"]
    assert found["RestartPreventExitStatus"] == ["2"]
    # Each of these closes /dev/nvidia* or forbids compiled kernels.
    assert not {"PrivateDevices", "ProtectClock", "MemoryDenyWriteExecute"} & found.keys()


def test_the_document_uses_the_folders_that_the_unit_makes(tmp_path: Path) -> None:
    from hisparsed.config.node import load_node_config

    laid_out(tmp_path)
    path = tmp_path / "etc/hisparsed/hisparsed.yaml"
    config = load_node_config(path, memory_bytes=2**40).value
    found = unit(tmp_path)
    assert config.state_dir == Path("/var/lib") / found["StateDirectory"][0]
    assert config.control_socket.parent == Path("/run") / found["RuntimeDirectory"][0]
    assert config.policy == tmp_path / "etc/hisparsed/policy.yaml"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd on this machine")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    laid_out(tmp_path)
    result = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / UNIT)],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="no systemd on this machine")
def test_systemd_makes_the_user_and_group(tmp_path: Path) -> None:
    laid_out(tmp_path)
    command = ["systemd-sysusers", f"--root={tmp_path}"]
    subprocess.run(command, capture_output=True, check=True)
    assert "hisparsed:" in (tmp_path / "etc/passwd").read_text()
    assert "hisparsed:" in (tmp_path / "etc/group").read_text()


def test_the_drop_in_is_a_section_of_settings(tmp_path: Path) -> None:
    laid_out(tmp_path, systemd=255)
    parser = configparser.ConfigParser()
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(tmp_path / "etc/systemd/system/hisparsed.service.d/back-off.conf")
    assert dict(parser["Service"]) == {"RestartSteps": "5", "RestartMaxDelaySec": "10min"}
