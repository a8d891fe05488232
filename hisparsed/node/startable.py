"""The check that a start makes before it takes anything; `serve` and the doctor call it.

Refusals by the kind of node are in ``engine.launch``; what must be tried, such as ports, is not
checked.
"""

from __future__ import annotations

from collections.abc import Mapping

from hisparsed.config.node import NodeConfig
from hisparsed.control.api.socket import path_problem
from hisparsed.engine.environment import environment_problems
from hisparsed.errors import UserError
from hisparsed.node.resources import temporary_folder


def start_problems(config: NodeConfig, environ: Mapping[str, str]) -> list[str]:
    """Each names the setting and the expected value."""
    problem = path_problem(config.control_socket)
    found = [*environment_problems(environ), *([problem] if problem is not None else [])]
    try:
        temporary_folder()
    except UserError as error:
        found.append(str(error))
    return found


def require_startable(config: NodeConfig, environ: Mapping[str, str]) -> None:
    """Raises ``UserError`` with all problems."""
    problems = start_problems(config, environ)
    if problems:
        raise UserError("\n".join(problems))
