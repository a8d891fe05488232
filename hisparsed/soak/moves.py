"""Random moves of every lever, in any combination, to any value the engine may be asked for.

Pure and seeded. A move is an engine command or a reset of the prefix caches; the engine bounds
what it is asked for, so targets beyond floors and budgets are drawn too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from hisparsed.engine.messages import AdmissionCommand, EngineCommand, EngineReport, HotReport

_RESET_SHARE = 0.04
_MULTIPLIERS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget all prefixes; ``running`` preempts what runs, ``connector`` forgets chunks too."""

    running: bool
    connector: bool


Move = EngineCommand | Reset


class Moves:
    """``geometry`` and what the node can do come from ``report``."""

    def __init__(self, seed: int, report: EngineReport) -> None:
        self._rng = random.Random(f"{seed} moves")
        self._geometry = report.geometry
        self._can_release = report.host.release == "possible"

    def next(self, hot: HotReport | None = None) -> Move:
        """One move; most change one or two levers. ``hot`` names requests that can have leases
        of their own, as of the last report."""
        rng = self._rng
        if rng.random() < _RESET_SHARE:
            return Reset(running=rng.random() < 0.5, connector=rng.random() < 0.5)
        fields: dict[str, object] = {}
        draws: dict[str, tuple[float, Callable[[], object]]] = {
            "offload_target_blocks": (0.6, self._offload_blocks),
            "reserve_target_blocks": (0.15, self._reserve_blocks),
            "multiplier": (0.35, lambda: rng.choice(_MULTIPLIERS)),
            "transition_watermark": (0.25, self._watermark),
            "admission": (0.3, self._admission),
            "session_ttl_s": (0.05, lambda: rng.choice((1.0, 30.0, 300.0))),
        }
        if self._can_release:
            draws["release_reserve"] = (0.1, lambda: rng.random() < 0.5)
        if hot is not None and hot.requests:
            draws["hot_leases"] = (0.2, lambda: self._leases(hot))
        while not fields:
            for name, (share, draw) in draws.items():
                if rng.random() < share:
                    fields[name] = draw()
        return EngineCommand.model_validate(fields)

    def pause_s(self, mean_s: float) -> float:
        """Until the next move."""
        return self._rng.uniform(0.2, 1.8) * mean_s

    def _offload_blocks(self) -> int:
        budget = self._geometry.budget_blocks
        # Half of the targets are small, where the pool is a cliff.
        return self._rng.randrange(self._rng.choice((budget // 8, budget + 1)))

    def _reserve_blocks(self) -> int:
        return self._rng.choice((0, 0, self._rng.randrange(self._geometry.budget_blocks)))

    def _leases(self, hot: HotReport) -> dict[str, int]:
        """What one request gets more another gets less; at times all are made equal again."""
        if self._rng.random() < 0.2:
            return {}
        geometry, even = self._geometry, hot.lease_blocks
        least = -(-geometry.topk // geometry.block_tokens)
        names = [one.request_id for one in hot.requests]
        self._rng.shuffle(names)
        leases: dict[str, int] = {}
        for more, less in zip(names[::2], names[1::2], strict=False):
            shift = self._rng.randint(
                0, max(0, min(even - least, geometry.max_lease_blocks - even))
            )
            leases |= {more: even + shift, less: even - shift}
        return leases

    def _watermark(self) -> int | str:
        blocks = self._geometry.gpu_blocks
        return self._rng.choice(("default", 0, blocks // 8, blocks // 2, blocks))

    def _admission(self) -> AdmissionCommand:
        rng = self._rng
        return AdmissionCommand(
            order=rng.choice(("arrival", "held-prefix-first")),
            ageing_s=rng.choice((0.01, 0.5, 5.0, 30.0)),
            max_running=rng.choice((1, 2, 4, self._geometry.max_num_seqs, None)),
        )
