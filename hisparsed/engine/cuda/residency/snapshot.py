"""Counters of a state bank as of a moment ago, without waiting for the device.

A copy is begun when somebody asks, and read when somebody asks again. Host memory for it is
taken once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hisparsed.kernels.api import ResolverState, StateBank, error_from, error_words

_NAMES = ("capacity", "step", "counters", "octile", "octile_misses", "ghost")


class Snapshots:
    """``begun`` int64 [G, S + 1, 2] is copied along."""

    def __init__(self, bank: StateBank, begun: torch.Tensor) -> None:
        self._bank = bank
        on_gpu = bank.device.type == "cuda"
        self._errors = error_words(bank.device)
        self._sources = {
            **{name: bank.arrays[name] for name in _NAMES},
            "retired": bank.retired,
            "begun": begun,
            "errors": self._errors,
        }
        self._held = torch.zeros(
            (bank.groups, bank.num_states + 1), dtype=torch.int64, device=bank.device
        )
        self._sources["held"] = self._held
        self._copies = {
            name: torch.zeros(source.shape, dtype=source.dtype, pin_memory=on_gpu)
            for name, source in self._sources.items()
        }
        self._event: Any = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._begun_copy = False

    def take(self) -> Taken | None:
        """The copy that was begun last, once it is complete; begins the next one then."""
        if self._event is not None and self._begun_copy and not self._event.query():
            return None
        taken = self._read() if self._begun_copy else None
        torch.sum(self._bank.arrays["slot_pos"] >= 0, dim=2, out=self._held)
        for name, source in self._sources.items():
            self._copies[name].copy_(source, non_blocking=True)
        if self._event is not None:
            self._event.record()
        self._begun_copy = True
        return taken

    def _read(self) -> Taken:
        found = {name: copy.clone() for name, copy in self._copies.items()}
        rows = self._bank.num_states
        states = []
        for group, state in enumerate(self._bank.states):
            counted: dict[str, Any] = {name: found[name][group, :rows] for name in _NAMES}
            states.append(replace(state, **counted))
        return Taken(
            tuple(states), found["retired"], found["begun"], found["held"], found["errors"]
        )


class Taken:
    """One picture, on the CPU. ``states`` have the arrays that are counted, no others."""

    def __init__(
        self,
        states: tuple[ResolverState, ...],
        retired: torch.Tensor,
        begun: torch.Tensor,
        held: torch.Tensor,
        errors: torch.Tensor,
    ) -> None:
        self.states = states
        self.retired = retired
        self.begun = begun
        self.held = held
        self.error = error_from(errors.tolist())
        """What the kernels refused since the engine began; ``None`` when nothing."""
