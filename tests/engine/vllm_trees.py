"""Runs a program with another vLLM's Python over the installed one's compiled parts.

``HISPARSED_VLLM_TREES`` names the folder where `make contract` keeps the sources.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from hisparsed.engine.compat.versions import TESTED, installed_vllm

INSTALLED = "installed"


def versions() -> list[str]:
    """The installed vLLM, and those whose sources are there."""
    folder = os.environ.get("HISPARSED_VLLM_TREES")
    others = [one for one in TESTED if one != installed_vllm()]
    return [INSTALLED, *(one for one in others if folder and (Path(folder) / one).is_dir())]


def environment_of(version: str, folder: Path) -> dict[str, str]:
    """Of a process without GPUs that imports ``version``; links lie in ``folder``."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    if version == INSTALLED:
        return environment
    over = over_installed_libraries(version, folder)
    path = os.pathsep.join(filter(None, (str(over), os.environ.get("PYTHONPATH"))))
    return {**environment, "PYTHONPATH": path, "VLLM_TARGET_DEVICE": "cpu"}


def over_installed_libraries(version: str, folder: Path) -> Path:
    """Makes ``folder`` a place to import the sources of ``version`` from, with the installed
    vLLM's compiled parts."""
    tree = Path(os.environ["HISPARSED_VLLM_TREES"]).absolute() / version / "vllm"
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    package = folder / "vllm"
    package.mkdir()
    for entry in (*tree.iterdir(), *Path(spec.origin).parent.glob("*.so")):
        (package / entry.name).symlink_to(entry)
    return folder
