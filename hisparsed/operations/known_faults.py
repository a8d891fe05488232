"""The table of known faults (`known_faults.yaml`): its form, and the faults that concern a node.

Facts about other people's software, with their public sources; adding one needs no code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, Field, field_validator

from hisparsed.config.node import NodeConfig
from hisparsed.policy.units import ByteSize

Source = Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+#\d+$")]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class _Fault(_Entry):
    id: str = Field(pattern=r"^[a-z0-9-]+$")
    title: str
    from_version: str = Field(alias="from")
    severity: Literal["fatal", "warning", "note"]
    fix: str
    sources: tuple[Source, ...] = Field(min_length=1)

    @field_validator("from_version")
    @classmethod
    def _is_a_version(cls, value: str) -> str:
        Version(value)
        return value

    @property
    def links(self) -> str:
        """The sources as addresses; the forge redirects an issue's address to a pull request."""
        pages = (source.replace("#", "/issues/") for source in self.sources)
        return ", ".join(f"https://github.com/{page}" for page in pages)


class FaultConditions(_Entry):
    """Conditions under which a fault matters to a node; an omitted condition always holds."""

    host_budget_from: ByteSize | None = None
    engine_args_above: dict[str, int] = Field(default_factory=dict)
    engine_args_unless: dict[str, Any] = Field(default_factory=dict)
    disaggregation_role: Literal["prefill", "decode"] | None = None
    drafts: bool = False
    """Only where drafts are verified."""

    def holds(self, config: NodeConfig) -> bool:
        role = config.disaggregation.role if config.disaggregation is not None else None
        arguments = config.engine_args
        return (
            (self.host_budget_from is None or config.host_budget >= self.host_budget_from)
            and all(_number(arguments.get(n)) > most for n, most in self.engine_args_above.items())
            and all(arguments.get(n) != value for n, value in self.engine_args_unless.items())
            and self.disaggregation_role in (None, role)
            and (not self.drafts or config.cuda.speculative_tokens > 0)
        )


class VllmFault(_Fault):
    fixed_in: str | None
    checked: date
    when: FaultConditions = FaultConditions()

    def concerns(self, version: Version, config: NodeConfig) -> bool:
        fixed = self.fixed_in is not None and version >= Version(self.fixed_in)
        return version >= Version(self.from_version) and not fixed and self.when.holds(config)


class SystemFault(_Fault):
    before: str | None
    host_budget_from: ByteSize | None = None

    def concerns(self, version: Version, config: NodeConfig) -> bool:
        ended = self.before is not None and version >= Version(self.before)
        reached = self.host_budget_from is None or config.host_budget >= self.host_budget_from
        return version >= Version(self.from_version) and not ended and reached


class KnownFaults(_Entry):
    vllm: tuple[VllmFault, ...]
    kernel: tuple[SystemFault, ...]
    driver: tuple[SystemFault, ...]


def load_known_faults() -> KnownFaults:
    """The shipped table."""
    path = Path(str(files("hisparsed.operations"))) / "known_faults.yaml"
    return KnownFaults.model_validate(yaml.safe_load(path.read_text("utf-8")))


def concerning(
    faults: tuple[VllmFault, ...] | tuple[SystemFault, ...], found: str, config: NodeConfig
) -> Iterator[VllmFault | SystemFault]:
    """Those of ``faults`` that concern a node with version ``found``."""
    version = parse_version(found)
    if version is not None:
        yield from (fault for fault in faults if fault.concerns(version, config))


def parse_version(text: str) -> Version | None:
    """The version that ``text`` begins with, such as 6.11.0 of "6.11.0-1013-oem"."""
    try:
        return Version(text)
    except InvalidVersion:
        match = re.match(r"\d+(\.\d+)*", text)
        return Version(match[0]) if match else None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
