"""The doctor: one full run before a start, and repeated runs next to a serving node.

A full run reads the node document, examines the machine, judges, and removes the files that dead
engines and daemons left. It asks the launch what the node's start would refuse. Later runs take no
port, no lock and no memory, and change nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from hisparsed.config.machine import GpuProbe, NodeKind, detect_node_kind
from hisparsed.config.node import NodeConfig, load_node_config
from hisparsed.control.live_policy import PolicySource
from hisparsed.control.status.document import DoctorFinding, Severity
from hisparsed.engine.cuda import launch
from hisparsed.engine.reference import launch as reference
from hisparsed.errors import UserError
from hisparsed.node import startable
from hisparsed.node.engine.processes import end_orphans
from hisparsed.node.engine.shared_memory import SharedMemoryRecord
from hisparsed.node.resources import forget_folder
from hisparsed.operations.checks import WHILE_RUNNING, Examination, Finding, examine
from hisparsed.operations.known_faults import load_known_faults
from hisparsed.operations.machine import (
    Machine,
    look_again,
    read_machine,
    remove_folder,
    remove_socket,
    sweep,
)
from hisparsed.policy.document import ConfigError, load_document
from hisparsed.policy.schema import Policy


def start_problems(config: NodeConfig, kind: NodeKind) -> tuple[str, ...]:
    """Sentences that name the setting and the expected value."""
    found = startable.start_problems(config, os.environ)
    try:
        policy = PolicySource(config.policy, clock=time.monotonic, wall_clock=time.time)
    except ConfigError as error:
        return (*found, str(error))
    if kind == "reference":
        try:
            most = reference.asked_multiplier(config, policy)
            reference.require_startable(config, max_multiplier=most)
        except UserError as error:
            found.append(str(error))
    if kind != "cuda":
        return tuple(found)
    multiplier = launch.asked_multiplier(config, policy)
    # The doctor reports what NVML does not provide, as a finding.
    machine = launch.read_machine_facts(on_unreadable=lambda _: None)
    return (*found, *launch.start_problems(config, machine, multiplier, os.environ))


_ANY_MEMORY = 2**62
"""A budget beyond the machine's memory is a finding here, not an error of the document."""


@dataclass(frozen=True, slots=True)
class Visit:
    node: str
    """One sentence on the node that would start."""
    findings: list[Finding]


def visit(document: Path, probe: GpuProbe, *, fix: bool) -> Visit:
    """Examine the machine for the node in ``document``.

    Raises ``ConfigError`` for an invalid one, and for an invalid policy, which would prevent a
    start too.
    """
    config = load_node_config(document, memory_bytes=_ANY_MEMORY).value
    load_document(config.policy, Policy)
    machine = read_machine(config)
    kind, problem = _kind(config, probe)
    question = Examination(
        config=config,
        document=document,
        document_unix_s=document.stat().st_mtime,
        kind=kind,
        machine=machine,
        faults=load_known_faults(),
        start_problems=start_problems(config, kind),
        kind_problem=problem,
    )
    findings = examine(question)
    return Visit(
        f"{kind} node of {document}", put_right(findings, machine, config) if fix else findings
    )


def _kind(config: NodeConfig, probe: GpuProbe) -> tuple[NodeKind, str | None]:
    """The kind of node that the document asks for, and why this machine does not support it.

    Only CUDA nodes have requirements on the machine, so only they can be impossible.
    """
    try:
        return detect_node_kind(config, probe).kind, None
    except UserError as error:
        return "cuda", str(error)


def put_right(findings: Sequence[Finding], machine: Machine, config: NodeConfig) -> list[Finding]:
    """Remove the files that dead engines and daemons left; returns the findings, with the fixed
    ones marked."""
    ended = end_orphans(config.state_dir) if machine.orphans else []
    gone = {str(pid) for pid in ended}
    if ended:
        SharedMemoryRecord(config.state_dir).remove()
    gone |= {str(file.path) for file in machine.shared_files if file.held is False and sweep(file)}
    if machine.dead_folder is not None and remove_folder(machine.dead_folder):
        gone.add(str(machine.dead_folder))
        forget_folder(config.state_dir)
    if machine.dead_socket is not None and remove_socket(machine.dead_socket):
        gone.add(str(machine.dead_socket))
    return [
        replace(one, fixed=True) if one.check in _FIXABLE and _path_of(one) in gone else one
        for one in findings
    ]


_FIXABLE = ("leaked-memory", "dead-daemon", "orphans")


def _path_of(finding: Finding) -> str:
    return finding.what.partition(" ")[0]


_BEFORE_START_ONLY = ("ports", "daemon", "dead-daemon", "orphans")
"""Checks of a machine that the node does not use yet; a running node has passed them."""


class NodeDoctor:
    """``again`` reads the values that may have changed since a picture of the machine."""

    def __init__(
        self,
        first: Examination,
        *,
        again: Callable[[Machine, NodeConfig], Machine] = look_again,
    ) -> None:
        self._question = first
        self._again = again
        self._fixed = [
            _finding(one, first.machine.unix_s)
            for one in examine(first)
            if one.check not in (*_BEFORE_START_ONLY, *WHILE_RUNNING)
        ]
        self._findings = [*self._fixed, *self._examine(first)]

    @classmethod
    def before_start(cls, config: NodeConfig, document: Path, kind: NodeKind) -> Self:
        """Make the first run; call it before the node takes ports, locks and memory."""
        return cls(
            Examination(
                config=config,
                document=document,
                document_unix_s=document.stat().st_mtime,
                kind=kind,
                machine=read_machine(config),
                faults=load_known_faults(),
                start_problems=start_problems(config, kind),
            )
        )

    @property
    def findings(self) -> Sequence[DoctorFinding]:
        return self._findings

    def look(self) -> Sequence[DoctorFinding]:
        """May block as long as the disk and the GPU driver. Raises ``OSError``."""
        before = self._question
        now = replace(before, machine=self._again(before.machine, before.config))
        self._findings = [*self._fixed, *self._examine(now)]
        return self._findings

    def _examine(self, question: Examination) -> list[DoctorFinding]:
        at_unix_s = question.machine.unix_s
        return [_finding(one, at_unix_s) for one in examine(question, WHILE_RUNNING)]


class AbsentDoctor:
    """Used if the machine could not be checked; reports that, and does not check again."""

    def __init__(self, error: Exception, *, at_unix_s: float) -> None:
        self._finding = DoctorFinding(
            check="doctor",
            severity=Severity.WARNING,
            what=f"the machine could not be checked: {type(error).__name__}: {error}",
            why="it is unknown whether the node can start",
            fix="hisparsed doctor",
            seen_unix_s=at_unix_s,
        )

    @property
    def findings(self) -> Sequence[DoctorFinding]:
        return [self._finding]

    def look(self) -> Sequence[DoctorFinding]:
        return self.findings


def _finding(one: Finding, at_unix_s: float) -> DoctorFinding:
    return DoctorFinding(
        check=one.check,
        severity=one.severity,
        what=one.what,
        why=one.why,
        fix=one.fix,
        seen_unix_s=at_unix_s,
    )
