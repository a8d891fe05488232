"""Frozen levers and more cautious modes that operators put above the policy.

Holds live in memory: they survive a policy reload and end with the daemon. They can only restrict
the policy. To allow more, edit the document or set a value for a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from hisparsed.policy.schema import LeverSettings, Mode, Policy
from hisparsed.policy.signals import Lever

_CAUTION = (Mode.ACT, Mode.ADVISE, Mode.OFF)


class Holds:
    """Frozen levers still get decisions, with the reason ``Frozen``."""

    def __init__(self) -> None:
        self._frozen: frozenset[Lever] = frozenset()
        self._modes: dict[Lever, Mode] = {}
        self.mode_actors: dict[Lever, str] = {}
        """The actor who set each mode."""

    @property
    def frozen(self) -> frozenset[Lever]:
        return self._frozen

    @property
    def modes(self) -> Mapping[Lever, Mode]:
        return MappingProxyType(self._modes)

    def freeze(self, levers: Iterable[Lever]) -> None:
        self._frozen |= frozenset(levers)

    def thaw(self, levers: Iterable[Lever]) -> None:
        self._frozen -= frozenset(levers)

    def set_mode(
        self, policy: Policy, levers: Iterable[Lever], mode: Mode | None, *, actor: str = "daemon"
    ) -> None:
        """``None`` goes back to the policy's mode.

        Raises ``ValueError`` when ``policy`` is more cautious than ``mode`` for one of the levers;
        then no mode changes.
        """
        levers = tuple(levers)
        if mode is None:
            for lever in levers:
                self._modes.pop(lever, None)
                self.mode_actors.pop(lever, None)
            return
        for lever in levers:
            written = policy.mode_of(lever)
            if _CAUTION.index(mode) < _CAUTION.index(written):
                raise ValueError(
                    f"the policy says {written} for {lever} and the more cautious mode counts, "
                    f"so {mode} cannot be set here; edit the document, or set levers.{lever}.mode "
                    "and mode for a time"
                )
        self._modes.update(dict.fromkeys(levers, mode))
        self.mode_actors.update(dict.fromkeys(levers, actor))

    def over(self, policy: Policy) -> Policy:
        """The policy with the modes set here."""
        if not self._modes:
            return policy
        settings = {
            lever.value: LeverSettings(mode=_more_cautious(mode, policy.mode_of(lever)))
            for lever, mode in self._modes.items()
        }
        return policy.model_copy(update={"levers": policy.levers.model_copy(update=settings)})


def _more_cautious(first: Mode, second: Mode) -> Mode:
    return max(first, second, key=_CAUTION.index)
