"""The package and its locks: folders as one package, entry points, exact pins, the audit."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import hisparsed

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def run(code: str, folder: Path) -> str:
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_every_folder_has_its_link() -> None:
    folders = PROJECT["tool"]["setuptools"]["package-dir"]
    for package, folder in folders.items():
        link = ROOT / package.replace(".", "/")
        assert link.resolve() == ROOT / folder
        assert package == "hisparsed" or (link.is_symlink() and not link.readlink().is_absolute())


def test_packages_import_from_anywhere(tmp_path: Path) -> None:
    code = (
        "import hisparsed.policy.units as units, hisparsed.kernels.api as api\n"
        "print(units.__file__, api.__file__)"
    )
    elsewhere = run(code, tmp_path).split()
    assert run(code, ROOT).split() == elsewhere
    assert [Path(path).resolve() for path in elsewhere] == [
        ROOT / "policy/units.py",
        ROOT / "kernels/api.py",
    ]


def test_kernels_has_no_init() -> None:
    assert (ROOT / "kernels").is_dir()
    assert not (ROOT / "kernels/__init__.py").exists()


def test_transformers_does_not_take_our_kernels_for_its_own() -> None:
    code = (
        "from importlib.util import find_spec\n"
        "from transformers.utils import is_kernels_available\n"
        "print(is_kernels_available(), find_spec('kernels').origin)"
    )
    assert run(code, ROOT) == "False None"  # without an origin it is no installed package


def test_version_and_entry_points() -> None:
    (plugin,) = entry_points(group="vllm.general_plugins", name="hisparsed")
    assert callable(plugin.load())
    (command,) = entry_points(group="console_scripts", name="hisparsed")
    assert command.dist is not None
    assert command.dist.version == hisparsed.__version__


def test_stat_logger_entry_point_is_what_vllm_asks_for() -> None:
    from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories

    ours = [one for one in load_stat_logger_plugin_factories() if "hisparsed" in one.__module__]
    assert [one.__qualname__ for one in ours] == ["HisparsedStatLogger"]


def test_locks_hold_exact_pins_only() -> None:
    for name in ("requirements-cpu.txt", "requirements-dev.txt", "requirements-cuda.txt"):
        lines = (ROOT / name).read_text("utf-8").splitlines()
        pins = [line for line in lines if not line.startswith("#")]
        assert pins == sorted(
            pins, key=lambda pin: pin.partition("==")[0].lower().replace("_", "-")
        )
        assert all(pin.count("==") == 1 and " " not in pin for pin in pins)
    cpu = (ROOT / "requirements-cpu.txt").read_text("utf-8")
    assert not any(line.startswith(("nvidia-c", "torchvision")) for line in cpu.splitlines())


PROJECT_TABLE = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT_TABLE["optional-dependencies"]
DIFFERENT_BUILDS = {"apache-tvm-ffi", "setuptools", "torch", "transformers", "triton"}
"""vLLM's builds for CPUs and for GPUs ask for different ones of these."""
LOCKS = ("requirements-cpu.txt", "requirements-cuda.txt", "requirements-dev.txt")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"ci_{name}", ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def lines(lock: str) -> list[str]:
    text = (ROOT / lock).read_text("utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def pins(lock: str) -> dict[str, Version]:
    pairs = (line.split("==") for line in lines(lock))
    return {canonicalize_name(name): Version(version) for name, version in pairs}


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_is_one_exact_pin_a_line_in_order(lock: str) -> None:
    assert all(Requirement(line).specifier for line in lines(lock))
    names = [canonicalize_name(line.partition("==")[0]) for line in lines(lock)]
    assert names == sorted(set(names))
    assert len(pins(lock)) == len(names)


@pytest.mark.parametrize(
    ("locks", "asked"),
    [
        (LOCKS[:1], [*PROJECT_TABLE["dependencies"], *EXTRAS["cpu"]]),
        (LOCKS[1:2], [*PROJECT_TABLE["dependencies"], *EXTRAS["cuda"]]),
        ((LOCKS[0], LOCKS[2]), [*EXTRAS["dev"], *EXTRAS["plots"]]),
    ],
    ids=["cpu", "cuda", "dev"],
)
def test_what_the_project_asks_for_is_pinned_within_its_bounds(
    locks: tuple[str, ...], asked: list[str]
) -> None:
    pinned = {name: version for lock in locks for name, version in pins(lock).items()}
    for requirement in map(Requirement, asked):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is in no lock: run `make lock`"
        assert requirement.specifier.contains(version, prereleases=True), (requirement, version)


def installed() -> dict[str, dict[str, Any]]:
    """As pip's report has them."""
    return {
        canonicalize_name(one.metadata["Name"]): {
            "name": one.metadata["Name"],
            "version": one.version,
            "requires_dist": one.requires or [],
        }
        for one in metadata.distributions()
    }


def test_the_locks_of_this_environment_are_whole_and_have_nothing_too_many() -> None:
    tool = load("lock")
    packages = installed()
    runtime = [*PROJECT_TABLE["dependencies"], *EXTRAS["cpu"]]
    needed = tool.closure(runtime, packages, tool.LEFT_OUT_ON_CPU)
    assert set(pins(LOCKS[0])) == needed
    assert set(pins(LOCKS[2])) == (
        tool.closure(EXTRAS["dev"], packages, tool.LEFT_OUT_ON_CPU) - needed
    )


def test_a_package_of_two_locks_has_one_version() -> None:
    cpu, cuda, dev = (pins(lock) for lock in LOCKS)
    assert not cpu.keys() & dev.keys()
    differing = {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]}
    assert differing <= DIFFERENT_BUILDS, differing - DIFFERENT_BUILDS


def report(*packages: dict[str, Any]) -> dict[str, Any]:
    return {"dependencies": list(packages), "fixes": []}


def test_an_audit_fails_for_what_is_vulnerable_and_names_the_fix() -> None:
    tool = load("audit")
    hole = {"id": "CVE-1", "fix_versions": ["2.1"], "aliases": [], "description": ""}
    read = tool.read_report(
        "a.txt",
        report(
            {"name": "good", "version": "1", "vulns": []},
            {"name": "bad", "version": "2", "vulns": [hole]},
            {"name": "new", "skip_reason": "not found"},
        ),
    )
    assert (read.checked, read.unknown) == (2, 1)
    code, said = tool.verdict([read])
    assert code == 1
    assert "a.txt: VULNERABLE bad 2: CVE-1, fixed in 2.1" in said[1]


def test_an_audit_that_could_not_look_says_so() -> None:
    tool = load("audit")
    clean = tool.read_report("a.txt", report({"name": "good", "version": "1", "vulns": []}))
    assert tool.verdict([clean]) == (0, ["audit: a.txt: 1 packages checked"])
    code, said = tool.verdict([clean, None])
    assert code == 0
    assert "NOT AUDITED" in said[-1]
