"""From the node's configuration to a running engine: one seam, a body behind it for each kind.

A body is a module with the functions of ``NodeBody``. Bodies differ in what they refuse and in
vLLM's configuration; all else is the same code. Imports vLLM only when called.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

from hisparsed.config.kind import NodeKind
from hisparsed.config.node import NodeConfig
from hisparsed.engine.compat.features import require_supported_vllm
from hisparsed.engine.compat.versions import installed_vllm
from hisparsed.errors import EngineStartError, UserError

if TYPE_CHECKING:
    from hisparsed.engine.handle import EngineHandle


class HotPolicy(Protocol):
    """What the policy asks of hot buffers, in top-k, given the decode rows of a request."""

    def highest_multiplier(self, decode_query_len: int) -> float: ...

    def start_multiplier(self, decode_query_len: int) -> float: ...


class NodeBody(Protocol):
    """What a kind of node says about itself. Nothing here imports vLLM before the last two."""

    def served_names(self, config: NodeConfig) -> tuple[str, ...]:
        """What clients may ask for; the first is the model's name."""
        ...

    def asked_multiplier(self, config: NodeConfig, policy: HotPolicy) -> float:
        """The multiplier that vLLM's tables must have room for."""
        ...

    def require_startable(self, config: NodeConfig, *, max_multiplier: float) -> None:
        """Refuse what can never start. Raises ``UserError``."""
        ...

    def vllm_config(self, config: NodeConfig, *, max_multiplier: float) -> Any:
        """vLLM's configuration. Raises ``UserError`` when vLLM refuses it."""
        ...

    def llm_class(self) -> Any:
        """``AsyncLLM`` or a subclass of it."""
        ...


def body_of(kind: NodeKind) -> NodeBody:
    """The body of a node that serves; raises ``UserError`` for one that does not."""
    if kind == "cuda":
        from hisparsed.engine.cuda import launch as cuda

        return cuda
    if kind == "reference":
        from hisparsed.engine.reference import launch as reference

        return reference
    raise UserError(
        f"node: {kind} serves nobody, because its time is virtual; try policies on it with "
        "`hisparsed simulate`, or set node: reference to serve"
    )


def served_names(config: NodeConfig, kind: NodeKind) -> tuple[str, ...]:
    """What clients may ask the node for; the first is the model's name."""
    return body_of(kind).served_names(config)


def asked_multiplier(config: NodeConfig, kind: NodeKind, policy: HotPolicy) -> float:
    """``max_multiplier`` for the functions below: the policy's highest where buffers can change
    size while the node runs, else what it starts with."""
    return body_of(kind).asked_multiplier(config, policy)


def require_startable(config: NodeConfig, kind: NodeKind, *, max_multiplier: float) -> None:
    """Refuse what can never start, before anything is taken and vLLM is imported.

    ``max_multiplier`` is the policy's, in top-k. Raises ``UserError``.
    """
    require_supported_vllm(config, kind, installed_vllm(), os.environ)
    body_of(kind).require_startable(config, max_multiplier=max_multiplier)


def launch_engine(config: NodeConfig, kind: NodeKind, *, max_multiplier: float) -> EngineHandle:
    """Start the engine of a ``config`` that is startable; blocks until it can serve.

    ``max_multiplier``, in top-k, bounds any hot buffer; vLLM sizes its tables for it.
    Raises ``UserError`` when vLLM refuses the configuration, ``EngineStartError`` when the engine
    then does not start.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", config.log.level.upper())
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from hisparsed.engine.handle import start_engine

    body = body_of(kind)
    vllm_config = body.vllm_config(config, max_multiplier=max_multiplier)
    try:
        return start_engine(vllm_config, body.llm_class())
    except Exception as error:
        raise EngineStartError(f"{error}\nThe lines above, from vLLM, say why.") from error
