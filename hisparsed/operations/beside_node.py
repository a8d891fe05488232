"""The doctor of a node that serves: the whole visit before the start, then what can change.

Later looks take no port, no lock and no memory, and put nothing right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from hisparsed.config.kind import NodeKind
from hisparsed.config.node import NodeConfig
from hisparsed.control.status_doctor import DoctorFinding, Severity
from hisparsed.operations.checks import WHILE_RUNNING, Question, examine
from hisparsed.operations.engine_start import start_problems
from hisparsed.operations.findings import Finding
from hisparsed.operations.known_faults import load_known_faults
from hisparsed.operations.machine import Machine, look_again, read_machine

_BEFORE_START_ONLY = ("ports", "daemon", "dead-daemon")
"""Said of a machine that the node has not taken yet; a node that runs has answered them."""


class NodeDoctor:
    """``again`` reads what may have changed since a picture of the machine."""

    def __init__(
        self,
        first: Question,
        *,
        again: Callable[[Machine, NodeConfig], Machine] = look_again,
    ) -> None:
        self._question = first
        self._again = again
        self._fixed = [
            _told(one, first.machine.unix_s)
            for one in examine(first)
            if one.check not in (*_BEFORE_START_ONLY, *WHILE_RUNNING)
        ]
        self._findings = [*self._fixed, *self._examine(first)]

    @classmethod
    def before_start(cls, config: NodeConfig, document: Path, kind: NodeKind) -> Self:
        """Make the first look; call it before the node takes ports, locks and memory."""
        return cls(
            Question(
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
        """May block as long as disk and GPU driver do. Raises ``OSError``."""
        before = self._question
        now = replace(before, machine=self._again(before.machine, before.config))
        self._findings = [*self._fixed, *self._examine(now)]
        return self._findings

    def _examine(self, question: Question) -> list[DoctorFinding]:
        at_unix_s = question.machine.unix_s
        return [_told(one, at_unix_s) for one in examine(question, WHILE_RUNNING)]


class AbsentDoctor:
    """Stands in where the machine could not be looked at; says so, and does not look again."""

    def __init__(self, error: Exception, *, at_unix_s: float) -> None:
        self._finding = DoctorFinding(
            check="doctor",
            severity=Severity.WARNING,
            what=f"the machine could not be looked at: {type(error).__name__}: {error}",
            why="what a start needs is not known to be there",
            fix="hisparsed doctor",
            seen_unix_s=at_unix_s,
        )

    @property
    def findings(self) -> Sequence[DoctorFinding]:
        return [self._finding]

    def look(self) -> Sequence[DoctorFinding]:
        return self.findings


def _told(one: Finding, at_unix_s: float) -> DoctorFinding:
    return DoctorFinding(
        check=one.check,
        severity=one.severity,
        what=one.what,
        why=one.why,
        fix=one.fix,
        seen_unix_s=at_unix_s,
    )
