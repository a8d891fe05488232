"""The values that an engine starts with: the engine's part of the node document.

Two sets of values can be compared, kept in a file and put back into a document. They do not include
what the daemon keeps while engines come and go (addresses, state folder, journal). Also how long
starting and stopping may take, by the host memory that is pinned: the service manager is asked for
that time, and vLLM's workers get the same before they are killed. Each rank registers the whole
pool with its GPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Final

from hisparsed.config.machine import NodeKind
from hisparsed.config.node import NodeConfig
from hisparsed.control.file_watch import differences
from hisparsed.policy.keys import PendingRestart

_GIB = 2**30
_START_S = 3600.0
"""Weights may come over a network."""
_PIN_S_PER_GIB = 1.2
"""Pinning about 700 GB took twelve minutes in one report (NVIDIA/TensorRT-LLM issue 17429)."""
_NEXT_RANK_S_PER_GIB = 0.15
"""Each further rank registers existing pages; 0.1 s per GB is usual."""
_STOP_S = 20.0
_UNPIN_S_PER_GIB = 0.5
"""Well above the time for unpinning; a kill in the middle of it saves no time."""


def start_limit_s(config: NodeConfig) -> float:
    """Seconds after which a start is taken for hung."""
    return _START_S + _by_memory(config, _PIN_S_PER_GIB)


def engine_stop_s(config: NodeConfig) -> float:
    """Seconds that the engine gets to stop before it is killed."""
    return _STOP_S + _by_memory(config, _UNPIN_S_PER_GIB)


def _by_memory(config: NodeConfig, first_rank_s_per_gib: float) -> float:
    ranks = 1 if config.node == "reference" else config.cuda.tensor_parallel_size
    s_per_gib = first_rank_s_per_gib + (ranks - 1) * _NEXT_RANK_S_PER_GIB
    return s_per_gib * config.host_budget / _GIB


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
    proved_multiplier: float | None = None
    """The multiplier instead of it where hisparsed's kernels are proved before the start; ``None``
    where the document names the kernels."""
    multiplier_key: str = field(default="hot.max", compare=False)
    """The policy's key for it, for people."""

    def digest(self) -> str:
        """Equal for values that start the same engine; keys of later versions have no influence."""
        values = self.config.model_dump(
            mode="json", exclude=set(DAEMON_KEYS), exclude_defaults=True
        )
        multipliers = [self.max_multiplier]
        if self.proved_multiplier is not None:
            multipliers.append(self.proved_multiplier)
        text = json.dumps([values, *multipliers], sort_keys=True)
        return sha256(text.encode()).hexdigest()

    def document(self) -> dict[str, Any]:
        """For a file; ``values_from`` reads it."""
        # Only the keys that were written: some are refused where they have no meaning.
        values = self.config.model_dump(mode="json", exclude=set(DAEMON_KEYS), exclude_unset=True)
        document = {"config": values, "max_multiplier": self.max_multiplier}
        if self.proved_multiplier is not None:
            document["proved_multiplier"] = self.proved_multiplier
        return document

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
        proved = (running.proved_multiplier, self.proved_multiplier)
        if None not in proved and proved[0] != proved[1]:
            changes.append(PendingRestart("hot.max", *(f"{one:g}" for one in proved)))
        return tuple(changes)

    def left_for_daemon(self, running: EngineValues) -> tuple[PendingRestart, ...]:
        """Keys of the daemon's that differ; only a restart of the daemon applies them."""
        return tuple(
            one
            for one in differences(running.config, self.config)
            if one.key.partition(".")[0] in DAEMON_KEYS
        )

    def within(self, daemon: NodeConfig) -> EngineValues:
        """These values, with the daemon's part from ``daemon``."""
        kept = {key: getattr(daemon, key) for key in DAEMON_KEYS}
        config = self.config.model_copy(update=kept)
        return replace(self, config=config)


def multiplier_key(config: NodeConfig, kind: NodeKind) -> str:
    """vLLM's own kernels have one size from start to end; others change it live."""
    return "hot.start" if kind == "cuda" and config.cuda.kernels != "hisparsed" else "hot.max"


def values_from(document: dict[str, Any], daemon: NodeConfig) -> EngineValues:
    """The values kept in ``document``, with the daemon's part from ``daemon``.

    Raises ``ValueError`` (pydantic's included) when it is not of this version.
    """
    config, max_multiplier = document.get("config"), document.get("max_multiplier")
    proved = document.get("proved_multiplier")
    if not isinstance(config, dict) or not isinstance(max_multiplier, int | float):
        raise ValueError("config or max_multiplier is missing")
    if not isinstance(proved, int | float | None):
        raise ValueError("proved_multiplier is not a number")
    node = {"node": daemon.node} | config
    values = EngineValues(
        NodeConfig.model_validate(node),
        float(max_multiplier),
        None if proved is None else float(proved),
    )
    return values.within(daemon)
