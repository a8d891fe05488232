"""What the node's own start would refuse, asked by the doctor: the launch's checks, not copies.

Memory, shared memory and the number of GPUs are left out, because the doctor says them itself.
"""

from __future__ import annotations

import os
import time

from hisparsed.config.kind import NodeKind
from hisparsed.config.node import NodeConfig
from hisparsed.control.policy_source import PolicySource
from hisparsed.engine.cuda import launch
from hisparsed.engine.process_start import start_method_problem
from hisparsed.errors import UserError


def start_problems(config: NodeConfig, kind: NodeKind) -> tuple[str, ...]:
    """Sentences that name the setting and what would be right."""
    problem = start_method_problem(os.environ)
    found = () if problem is None else (problem,)
    if kind != "cuda":
        return found
    try:
        policy = PolicySource(config.policy, clock=time.monotonic, wall_clock=time.time)
    except UserError as error:
        return (*found, str(error))
    multiplier = launch.asked_multiplier(config, policy)
    # What NVML does not tell is the doctor's to say, as a finding.
    machine = launch.read_machine(tell=lambda _: None)
    return (*found, *launch.start_problems(config, machine, multiplier, os.environ))
