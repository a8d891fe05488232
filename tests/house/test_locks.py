"""The locks: exact, whole, of the packages that pyproject.toml asks for; and what audits them."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
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
        (LOCKS[:1], [*PROJECT["dependencies"], *EXTRAS["cpu"]]),
        (LOCKS[1:2], [*PROJECT["dependencies"], *EXTRAS["cuda"]]),
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
    runtime = [*PROJECT["dependencies"], *EXTRAS["cpu"]]
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
