"""Sizes of the demo and the two documents it starts its nodes with.

Chosen so that a CPU shows what a GPU node does under load: more sessions than the pools can
hold, a slab smaller than the running requests, and a start split as the vLLM blog has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import yaml


@dataclass(frozen=True)
class DemoSettings:
    """One demo run. Token counts of the trace are multiplied by ``scale``."""

    scale: Fraction = Fraction(1, 16)
    concurrency: int = 24
    max_num_seqs: int = 8
    max_model_len: int = 4224
    gpu_blocks: int = 1500
    host_budget: str = "44MiB"
    max_num_batched_tokens: int = 384
    seed: int = 0


NODE_HEADER = "# Written by `hisparsed demo`.\n"


def node_document(settings: DemoSettings, folder: Path, port: int, policy: Path) -> str:
    """``hisparsed.yaml`` of a demo node that keeps everything under ``folder``."""
    return NODE_HEADER + yaml.safe_dump(
        {
            "node": "reference",
            "host_budget": settings.host_budget,
            "reference": {
                "gpu_blocks": settings.gpu_blocks,
                "max_model_len": settings.max_model_len,
                "max_num_seqs": settings.max_num_seqs,
                "max_num_batched_tokens": settings.max_num_batched_tokens,
                "seed": settings.seed,
            },
            "api": {"host": "127.0.0.1", "port": port},
            "metrics": {"host": "127.0.0.1", "port": port},
            "control_socket": str(folder / "control.sock"),
            "state_dir": str(folder / "state"),
            "policy": str(policy),
            "drain_timeout": "10s",
            "log": {"level": "warning", "format": "json"},
        },
        sort_keys=False,
    )


def policy_document(mode: str) -> str:
    """``policy.yaml`` with the demo's short windows; ``mode`` is ``act`` or ``off``."""
    return NODE_HEADER + yaml.safe_dump(
        {
            "version": 1,
            "mode": mode,
            "tick": "500ms",
            "stale_after": "10s",
            "pools": {"offload": {"floor": "3%", "ceiling": "50%", "start": "25%"}},
            "rebalance": {
                "margin": "20%",
                "window": "3s",
                "dead_band": {"relative": "5%", "absolute": "1%"},
                "step": "2%",
                "step_towards_safety": "6%",
                "cool_down": "2s",
                "cool_down_towards_safety": "1s",
                "hold_off": "10s",
            },
            "hot": {
                "min": 1.0,
                "max": 4.0,
                "start": 4.0,
                "step": 1.0,
                "free_low": "10%",
                "free_high": "40%",
                "window_shrink": "2s",
                "window_grow": "8s",
                "pcie_budget": "1GiB",
            },
            "admission": {"engage_at": "70%", "release_at": "50%", "ageing": "25s"},
            # The two runs that are compared get the same calls and nothing else.
            "canary": {"enabled": False},
        },
        sort_keys=False,
    )
