"""Environment variables that vLLM reads: those that prevent a start, and those not meant for it.

Kubernetes gives every container `NAME_PORT=tcp://...` for each service, so a service called `vllm`
sets vLLM's own `VLLM_PORT`. Imports no vLLM, except where noted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping

from hisparsed.engine.plugin import DAEMON_GROUP_ENV, LAUNCHED_ENV
from hisparsed.errors import UserError
from hisparsed.policy.problems import shown

log = logging.getLogger("hisparsed.daemon")

METHOD_ENV = "VLLM_WORKER_MULTIPROC_METHOD"
METHOD = "spawn"
PORT_ENV = "VLLM_PORT"
PLUGINS_ENV = "VLLM_PLUGINS"
PLUGIN = "hisparsed"
"""Name of each entry point by which vLLM finds hisparsed."""
_LINK = ("tcp://", "udp://", "sctp://")
_OURS = "VLLM_"


def is_service_link(environ: Mapping[str, str]) -> bool:
    """Whether `VLLM_PORT` was set by Kubernetes for a service."""
    return environ.get(PORT_ENV, "").startswith(_LINK)


def environment_problems(environ: Mapping[str, str]) -> list[str]:
    """Settings with which no engine starts, each with the expected value."""
    found = []
    method, port = environ.get(METHOD_ENV), environ.get(PORT_ENV)
    if method not in (None, METHOD):
        found.append(
            f"{METHOD_ENV}: {method!r} starts no engine of hisparsed, whose processes must share "
            f"neither signals nor sockets with the daemon; unset it, or set it to {METHOD}"
        )
    plugins = environ.get(PLUGINS_ENV)
    if plugins is not None and PLUGIN not in plugins.split(","):
        found.append(
            f"{PLUGINS_ENV}: {shown(plugins)} leaves {PLUGIN} out, without which no engine can be "
            "controlled; add it, or unset the variable"
        )
    if port is not None and not is_service_link(environ) and not _is_port(port):
        found.append(f"{PORT_ENV}: {shown(port)} is not a port; unset it, or set 1 to 65535")
    return found


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < int(text[:6]) < 65536 and len(text) < 6


def set_process_start(environ: MutableMapping[str, str]) -> None:
    """Call before vLLM is imported, with the environment of this process.

    Raises ``UserError`` for settings with which no engine starts.
    """
    problems = environment_problems(environ)
    if problems:
        raise UserError("\n".join(problems))
    if is_service_link(environ):
        link = environ.pop(PORT_ENV)
        log.warning(
            "%s=%s is ignored: Kubernetes sets it for a service called vllm. "
            "`enableServiceLinks: false` in the pod avoids it.",
            PORT_ENV,
            link,
        )
    environ[METHOD_ENV] = METHOD
    environ[LAUNCHED_ENV] = "1"
    environ[DAEMON_GROUP_ENV] = str(os.getpgrp())


def refuse_unreadable(environ: Mapping[str, str]) -> None:
    """Imports vLLM. Raises ``UserError`` for variables of vLLM that it cannot read.

    vLLM reads them one by one, most of them when the engine has loaded its weights.
    """
    from vllm.envs import environment_variables

    problems = []
    for name in sorted(environ):
        read = environment_variables.get(name) if name.startswith(_OURS) else None
        try:
            if read is not None:
                read()
        except Exception as error:
            problems.append(f"{name}: vLLM cannot read {shown(environ[name])} ({error}); unset it")
    if problems:
        raise UserError("\n".join(problems))
