"""The settings of one soak: its seed, its node, how often things happen, when it ends.

The node is small on purpose: a slab that holds a fraction of what runs, and pools that random
splits make too small for the sessions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hisparsed.config.node import NodeConfig
from hisparsed.config.sections import ReferenceConfig
from hisparsed.replay.trace import SHIPPED_TRACE

MAX_MULTIPLIER = 4.0
STEP_S = 0.02
"""Seconds that the engine's clock advances in each step, however long the step really takes."""


@dataclass(frozen=True)
class SoakSettings:
    """Times are of the engine's clock (``STEP_S`` a step), except ``for_s``."""

    seed: int = 0
    for_s: float | None = None
    """Real seconds until no more calls are sent; ``None`` for no such end."""
    max_steps: int | None = None
    max_moves: int | None = None
    moves_every_s: float = 0.3
    """Mean time between two moves."""
    quiet_every_s: float = 40.0
    quiet_s: float = 10.0
    """In every ``quiet_every_s`` nothing is moved for this long, to compare with."""
    clients: int = 16
    """Most calls that are open at one time."""
    cancel_share: float = 0.2
    sample_share: float = 0.2
    """Share of the answers that are verified; cut ones are verified as far as they came."""
    stuck_after_s: float = 300.0
    """A call that makes no progress for this long is stuck."""
    trace: Path = SHIPPED_TRACE
    speculative_tokens: int = 0
    eager_host_mirror: bool = True

    def __post_init__(self) -> None:
        if self.for_s is None and self.max_steps is None and self.max_moves is None:
            raise ValueError("a soak needs an end: for_s, max_steps or max_moves")


def node_config(settings: SoakSettings, folder: Path) -> NodeConfig:
    """The node under test: everything is short, so everything moves."""
    return _config(
        folder,
        host_budget=6 << 20,
        reference=_reference(settings, gpu_blocks=320, ack_lag_steps=2),
    )


def oracle_config(settings: SoakSettings, folder: Path) -> NodeConfig:
    """The same model with room for everything, without moves."""
    return _config(
        folder,
        host_budget=32 << 20,
        reference=_reference(settings, gpu_blocks=4000, ack_lag_steps=0).model_copy(
            update={"speculative_tokens": 0, "eager_host_mirror": True}
        ),
    )


def _reference(settings: SoakSettings, gpu_blocks: int, ack_lag_steps: int) -> ReferenceConfig:
    return ReferenceConfig(
        layers=4,
        index_groups=2,
        index_topk=32,
        block_size=16,
        gpu_blocks=gpu_blocks,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        ack_lag_steps=ack_lag_steps,
        seed=settings.seed,
        speculative_tokens=settings.speculative_tokens,
        eager_host_mirror=settings.eager_host_mirror,
    )


def _config(folder: Path, *, host_budget: int, reference: ReferenceConfig) -> NodeConfig:
    return NodeConfig(
        node="reference", host_budget=host_budget, reference=reference, state_dir=folder
    )
