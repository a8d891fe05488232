"""One visit of the doctor: read the node's document, look at the machine, judge, put right.

Puts right only what nobody holds: files of dead engines and folders of dead daemons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hisparsed.config.kind import GpuProbe, NodeKind, detect_node_kind
from hisparsed.config.node import NodeConfig, load_node_config
from hisparsed.errors import UserError
from hisparsed.operations.checks import Question, examine
from hisparsed.operations.engine_start import start_problems
from hisparsed.operations.findings import Finding
from hisparsed.operations.known_faults import load_known_faults
from hisparsed.operations.leaks import remove_folder, sweep
from hisparsed.operations.machine import Machine, read_machine
from hisparsed.policy.document import load_document
from hisparsed.policy.schema import Policy

_ANY_MEMORY = 2**62
"""A budget beyond the machine's memory is a finding here, not a mistake of the document."""


@dataclass(frozen=True, slots=True)
class Visit:
    node: str
    """What would start: one sentence."""
    findings: list[Finding]


def visit(document: Path, probe: GpuProbe, *, fix: bool) -> Visit:
    """Examine the machine for the node in ``document``.

    Raises ``ConfigError`` for a bad one, and for a bad policy, which would end a start too.
    """
    config = load_node_config(document, memory_bytes=_ANY_MEMORY).value
    load_document(config.policy, Policy)
    machine = read_machine(config)
    kind, problem = _kind(config, probe)
    question = Question(
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
    return Visit(f"{kind} node of {document}", put_right(findings, machine) if fix else findings)


def _kind(config: NodeConfig, probe: GpuProbe) -> tuple[NodeKind, str | None]:
    """What the document asks for, and why this machine cannot be it.

    Only CUDA nodes ask something of the machine, so that is the kind of one that cannot be.
    """
    try:
        return detect_node_kind(config, probe).kind, None
    except UserError as error:
        return "cuda", str(error)


def put_right(findings: Sequence[Finding], machine: Machine) -> list[Finding]:
    """Remove what dead engines and daemons left; the findings, with what was put right marked."""
    gone = {str(file.path) for file in machine.offload_files if file.held is False and sweep(file)}
    if machine.dead_folder is not None and remove_folder(machine.dead_folder):
        gone.add(str(machine.dead_folder))
    return [
        replace(one, fixed=True) if one.check in _FIXABLE and _path_of(one) in gone else one
        for one in findings
    ]


_FIXABLE = ("leaked-memory", "dead-daemon")


def _path_of(finding: Finding) -> str:
    return finding.what.partition(" ")[0]
