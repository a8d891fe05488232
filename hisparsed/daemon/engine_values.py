"""What an engine is started with: the part of the node's document that is the engine's.

Two sets of values can be compared, kept in a file and put back into a document. Everything that
the daemon holds while engines come and go (addresses, state folder, journal) is not in them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

from hisparsed.config.kind import NodeKind
from hisparsed.config.node import NodeConfig
from hisparsed.control.node_file import differences
from hisparsed.policy.restart import PendingRestart

DAEMON_KEYS: Final = frozenset(
    {
        "node",
        "api",
        "metrics",
        "control_socket",
        "state_dir",
        "policy",
        "drain_timeout",
        "supervision",
        "journal",
        "log",
    }
)
"""Keys of the document that a restart of the engine leaves as they are."""


@dataclass(frozen=True)
class EngineValues:
    """``config`` is the whole document; only what is not in ``DAEMON_KEYS`` counts."""

    config: NodeConfig
    max_multiplier: float
    """The largest hot buffer that the policy may ask for, in top-k."""
    multiplier_key: str = field(default="hot.max", compare=False)
    """The policy's key that says it, for people."""

    def digest(self) -> str:
        """Equal for values that start the same engine; keys of later versions change nothing."""
        values = self.config.model_dump(
            mode="json", exclude=set(DAEMON_KEYS), exclude_defaults=True
        )
        text = json.dumps([values, self.max_multiplier], sort_keys=True)
        return sha256(text.encode()).hexdigest()

    def document(self) -> dict[str, Any]:
        """For a file; ``restored`` reads it."""
        # Only what was written: some keys are refused where they have no meaning.
        values = self.config.model_dump(mode="json", exclude=set(DAEMON_KEYS), exclude_unset=True)
        return {"config": values, "max_multiplier": self.max_multiplier}

    def changes_from(self, running: EngineValues) -> tuple[PendingRestart, ...]:
        """Keys whose values differ from those of ``running``."""
        changes = [
            one
            for one in differences(running.config, self.config)
            if one.key.partition(".")[0] not in DAEMON_KEYS
        ]
        if self.max_multiplier != running.max_multiplier:
            was, new = f"{running.max_multiplier:g}", f"{self.max_multiplier:g}"
            changes.append(PendingRestart(self.multiplier_key, was, new))
        return tuple(changes)

    def left_for_daemon(self, running: EngineValues) -> tuple[PendingRestart, ...]:
        """Keys of the daemon's that differ; only a restart of the daemon takes them up."""
        return tuple(
            one
            for one in differences(running.config, self.config)
            if one.key.partition(".")[0] in DAEMON_KEYS
        )

    def within(self, daemon: NodeConfig) -> EngineValues:
        """These values, with what is the daemon's from ``daemon``."""
        kept = {key: getattr(daemon, key) for key in DAEMON_KEYS}
        config = self.config.model_copy(update=kept)
        return EngineValues(config, self.max_multiplier, self.multiplier_key)


def multiplier_key(config: NodeConfig, kind: NodeKind) -> str:
    """vLLM's own kernels know one size, from start to end; others change it live."""
    return "hot.start" if kind == "cuda" and config.cuda.kernels == "vllm" else "hot.max"


def restored(document: dict[str, Any], daemon: NodeConfig) -> EngineValues:
    """What ``document`` kept, with what is the daemon's from ``daemon``.

    Raises ``ValueError`` (pydantic's included) when it is not of this version.
    """
    config, max_multiplier = document.get("config"), document.get("max_multiplier")
    if not isinstance(config, dict) or not isinstance(max_multiplier, int | float):
        raise ValueError("config or max_multiplier is missing")
    node = {"node": daemon.node} | config
    return EngineValues(NodeConfig.model_validate(node), float(max_multiplier)).within(daemon)
