"""The experiments of docs/study.md, each a call of `hisparsed simulate`. Data only.

In the order of what they are worth: the study runs all of them with the first seed before any
with the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ADAPTIVE = "policy"
"""The shipped policy."""
_AGENTS = "{traces}/claude-code-128k.jsonl.gz"
_CHAT = "{traces}/mooncake-conversation.jsonl.gz"


@dataclass(frozen=True, slots=True)
class Experiment:
    """``name`` is that of its table; ``policies`` and ``options`` as on the command line."""

    name: str
    policies: Sequence[str]
    options: Sequence[str]
    seeds: int = 1
    oracle: bool = False
    """Whether the first policy is held against the best of the others."""

    def command(self, traces: str, *seed: str) -> list[str]:
        """Arguments of `hisparsed`; ``seed`` are those that choose seeds."""
        policies = [part for policy in self.policies for part in ("--policy", policy)]
        options = [one.format(traces=traces) for one in self.options]
        return ["simulate", *options, *seed, *policies]


def _users(*counts: int) -> tuple[str, ...]:
    return tuple(part for count in counts for part in ("--users", str(count)))


def _fixed(*shares: int) -> tuple[str, ...]:
    return tuple(f"{ADAPTIVE},pools.hisparse={share}%" for share in shares)


def _shares(*values: str) -> tuple[str, ...]:
    """Of the starts for the call that has waited longest."""
    return tuple(f"{ADAPTIVE},admission.oldest_share={value}" for value in values)


def _held(multiplier: int) -> str:
    """Hot buffers of one size, with scratch for what does not fit."""
    return ADAPTIVE + "".join(f",hot.{key}={multiplier}" for key in ("min", "start", "max"))


_SHORT = ("--for", "10m", "--warmup", "3m")
_OPENHANDS = ("--trace", "openhands", "--for", "3m", "--warmup", "45s", "--scale", "1/4")
_HOT = (_held(5), _held(2), ADAPTIVE, f"{ADAPTIVE},hot.sharing=marginal-gain")
_SPREAD = ("--curve-spread", "1")

EXPERIMENTS = (
    Experiment(
        "openhands", ("standard", "stock", ADAPTIVE), (*_OPENHANDS, *_users(8, 16, 24, 32)), 3
    ),
    Experiment(
        "load",
        ("stock", ADAPTIVE),
        ("--trace", _AGENTS, *_users(64, 96, 128, 192), "--for", "15m", "--warmup", "5m"),
        2,
    ),
    Experiment(
        "late",
        ("stock", ADAPTIVE),
        ("--trace", _AGENTS, *_users(96, 128), "--for", "25m", "--warmup", "12m"),
    ),
    Experiment(
        "split",
        (ADAPTIVE, *_fixed(75, 90, 95, 97)),
        ("--trace", _AGENTS, *_users(128), "--for", "20m", "--warmup", "8m"),
        oracle=True,
    ),
    Experiment("hot", _HOT, (*_OPENHANDS, *_users(16, 32, 48), *_SPREAD), 2),
    Experiment(
        "hot-worse",
        _HOT,
        (*_OPENHANDS, *_users(32), *_SPREAD, "--misses", "x1.5", "--union", "x1.5"),
        2,
    ),
    Experiment(
        "change",
        (ADAPTIVE, "stock", *_fixed(90, 95)),
        ("--trace", _AGENTS, *_users(96), "--then", _CHAT, "--for", "16m", "--warmup", "3m"),
        2,
        oracle=True,
    ),
    Experiment(
        "chat",
        (ADAPTIVE, "stock", *_fixed(85, 90, 95)),
        ("--trace", _CHAT, *_SHORT),
        oracle=True,
    ),
    Experiment(
        "admission",
        (
            "stock",
            *_shares("0%", "0%,admission.ageing=2m", "0%,admission.ageing=4m"),
            *_shares("10%", "20%", "33%"),
        ),
        ("--trace", _AGENTS, *_users(128), "--for", "20m", "--warmup", "5m"),
    ),
    Experiment(
        "crowded",
        ("stock", *_shares("0%", "0%,admission.ageing=2m", "20%", "33%")),
        ("--trace", _AGENTS, *_users(192), "--for", "20m", "--warmup", "5m"),
    ),
    Experiment(
        "copies",
        ("stock", "stock,copies=1", ADAPTIVE, f"{ADAPTIVE},copies=8"),
        ("--trace", _AGENTS, *_users(96), *_SHORT),
    ),
    Experiment(
        "store",
        (
            *(ADAPTIVE, f"{ADAPTIVE},offload.policy=arc", f"{ADAPTIVE},offload.threshold=2"),
            f"{ADAPTIVE},offload.prompt_only=true",
        ),
        ("--trace", _AGENTS, *_users(96), *_SHORT),
    ),
    Experiment(
        "mix",
        ("stock", ADAPTIVE),
        ("--trace", _AGENTS, "--trace", _CHAT, *_users(96), *_SHORT),
    ),
    Experiment(
        "limits",
        (
            f"{ADAPTIVE},levers.admission.mode=off",
            f"{ADAPTIVE},admission.max_waiting_sessions=4,admission.when_full=wait",
            f"{ADAPTIVE},admission.max_waiting_sessions=4,admission.when_full=refuse",
        ),
        ("--trace", _AGENTS, *_users(128), "--for", "15m", "--warmup", "5m"),
    ),
    Experiment(
        "openhands-one",
        ("standard", "stock", ADAPTIVE),
        ("--trace", "openhands", *_users(1), "--for", "3m", "--warmup", "45s", "--scale", "1"),
    ),
)
