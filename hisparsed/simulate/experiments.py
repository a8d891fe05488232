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


MEMORY = (
    *("users", "calls/h", "spread", "good/h", "hit", "recomputed"),
    *("running", "TTFT p50", "p99", "unserved", "ITL", "load"),
)
PAIRS = (*MEMORY, "p99 of both")
STEPS = (
    *("users", "calls/h", "spread", "tok/s", "good/h", "hit", "preempted"),
    *("running", "TTFT p50", "p99", "ITL", "link", "moves"),
)


@dataclass(frozen=True, slots=True)
class Experiment:
    """``name`` is that of its table; ``policies`` and ``options`` as on the command line."""

    name: str
    policies: Sequence[str]
    options: Sequence[str]
    users: Sequence[int] = ()
    """Each is a run of its own; none where sessions start when the trace says."""
    loads: Sequence[float] = ()
    """As ``users``, for the pace at which recorded sessions start."""
    seeds: int = 1
    first_seed: int = 0
    oracle: bool = False
    """Whether the first policy is held against the best of the others."""
    columns: Sequence[str] = MEMORY
    """Heads of the table's columns after the policy."""

    @property
    def runs(self) -> list[tuple[str, ...]]:
        """The options of each run that the others do not have."""
        found: list[tuple[str, ...]] = [("--users", str(count)) for count in self.users]
        found += [("--load", f"{load:g}") for load in self.loads]
        return found or [()]

    def command(self, traces: str, *own: str) -> list[str]:
        """Arguments of `hisparsed`; ``own`` are those of a run and its seeds."""
        policies = [part for policy in self.policies for part in ("--policy", policy)]
        options = [one.format(traces=traces) for one in self.options]
        return ["simulate", *options, *own, *policies]


def _fixed(*shares: int) -> tuple[str, ...]:
    return tuple(f"{ADAPTIVE},pools.hisparse={share}%" for share in shares)


def _held(multiplier: int) -> str:
    """Hot buffers of one size, with scratch for what does not fit."""
    return ADAPTIVE + "".join(f",hot.{key}={multiplier}" for key in ("min", "start", "max"))


def _engaged(at: int, released: int) -> str:
    return f"{ADAPTIVE},admission.engage_at={at}%,admission.release_at={released}%"


_CEILING = f"{ADAPTIVE},host.budget=4TiB"
"""As if nothing were ever lost: what remains is computing, GPU memory and the users' pauses."""
_ARRIVAL = f"{ADAPTIVE},levers.admission.mode=off"
_STEADY = ("--for", "30m", "--warmup", "12m")
"""Long enough that the backlog of everybody's first prompt is gone when measuring begins."""
_SHORT = ("--for", "20m", "--warmup", "8m")
_COLD = ("--for", "10m", "--warmup", "3m")
_CHANGE = ("--for", "24m", "--warmup", "6m", "--load", "0.5")
_OPENHANDS = ("--for", "3m", "--warmup", "45s", "--scale", "1/4", "--trace")
_HOT = (_held(5), _held(2), ADAPTIVE, f"{ADAPTIVE},hot.sharing=marginal-gain")
_SPREAD = ("--curve-spread", "1")

EXPERIMENTS = (
    Experiment(
        "load",
        ("stock", "stock,pools.hisparse=70%", ADAPTIVE, _CEILING),
        ("--trace", _AGENTS, *_STEADY),
        users=(64, 80, 96, 128),
        seeds=3,
        columns=PAIRS,
    ),
    Experiment(
        "engage",
        (_engaged(70, 55), _ARRIVAL),
        ("--trace", _AGENTS, *_STEADY),
        users=(96, 128),
        seeds=2,
    ),
    Experiment(
        "tail",
        ("stock", f"{ADAPTIVE},admission.oldest_share=50%", f"{ADAPTIVE},admission.ageing=4m"),
        ("--trace", _AGENTS, *_STEADY),
        users=(128,),
        seeds=2,
        columns=PAIRS,
    ),
    Experiment(
        "crowded",
        ("stock", ADAPTIVE),
        ("--trace", _AGENTS, "--for", "45m", "--warmup", "27m"),
        users=(192,),
        columns=PAIRS,
    ),
    Experiment(
        "split",
        (ADAPTIVE, *_fixed(60, 70, 75, 80, 85, 90, 94, 95, 96, 97, 98)),
        ("--trace", _AGENTS, *_STEADY),
        users=(128,),
        oracle=True,
    ),
    Experiment(
        "split-seeds",
        (ADAPTIVE, *_fixed(80, 85, 90, 94, 96)),
        ("--trace", _AGENTS, *_STEADY),
        users=(128,),
        first_seed=1,
        seeds=2,
        oracle=True,
    ),
    Experiment(
        "split-long",
        (ADAPTIVE, *_fixed(85, 90)),
        ("--trace", _AGENTS, "--for", "72m", "--warmup", "12m"),
        users=(128,),
        seeds=2,
        oracle=True,
    ),
    Experiment(
        "openhands",
        ("standard", "stock", ADAPTIVE),
        (*_OPENHANDS, "openhands"),
        users=(8, 16, 24, 32),
        seeds=2,
        columns=STEPS,
    ),
    Experiment(
        "chat",
        (ADAPTIVE, *_fixed(60, 70, 75, 80, 85, 90, 94, 95, 96, 97, 98)),
        ("--trace", _CHAT, *_SHORT),
        loads=(1.0,),
        oracle=True,
    ),
    Experiment(
        "chat-fits",
        (ADAPTIVE, *_fixed(75, 85, 90, 95, 97)),
        ("--trace", _CHAT, *_SHORT),
        loads=(0.5,),
        oracle=True,
    ),
    Experiment(
        "chat-load",
        ("stock", ADAPTIVE, _CEILING),
        ("--trace", _CHAT, *_SHORT),
        loads=(0.5, 1.0, 1.5),
    ),
    Experiment(
        "change",
        (ADAPTIVE, "stock", *_fixed(75, 90, 95, 97)),
        ("--trace", _AGENTS, "--then", _CHAT, *_CHANGE),
        users=(96,),
        seeds=2,
        oracle=True,
    ),
    Experiment(
        "change-back",
        (ADAPTIVE, "stock", *_fixed(90, 95)),
        ("--trace", _CHAT, "--then", _AGENTS, *_CHANGE, "--users", "96"),
        seeds=2,
        oracle=True,
    ),
    Experiment(
        "hot", _HOT, (*_OPENHANDS, "openhands", *_SPREAD), users=(16, 32, 48), columns=STEPS
    ),
    Experiment(
        "hot-worse",
        _HOT,
        (*_OPENHANDS, "openhands", *_SPREAD, "--misses", "x1.5", "--union", "x1.5"),
        users=(32,),
        columns=STEPS,
    ),
    Experiment(
        "admission",
        (
            _ARRIVAL,
            ADAPTIVE,
            f"{ADAPTIVE},admission.oldest_share=0%",
            f"{ADAPTIVE},admission.max_waiting_sessions=32,admission.when_full=wait",
            f"{ADAPTIVE},admission.max_waiting_sessions=32,admission.when_full=refuse",
        ),
        ("--trace", _AGENTS, *_SHORT),
        users=(64, 96, 128, 160),
    ),
    Experiment(
        "quarter",
        ("stock", ADAPTIVE),
        ("--trace", _AGENTS, *_SHORT, "--scale", "1/4"),
        users=(128,),
        columns=PAIRS,
    ),
    Experiment(
        "burst",
        ("stock", ADAPTIVE, _ARRIVAL),
        ("--trace", _AGENTS, "--for", "12m", "--warmup", "10s"),
        users=(96, 128, 192),
        columns=PAIRS,
    ),
    Experiment(
        "copies",
        ("stock", "stock,copies=1", ADAPTIVE, f"{ADAPTIVE},copies=8"),
        ("--trace", _AGENTS, *_SHORT),
        users=(128,),
    ),
    Experiment(
        "store",
        (
            *(ADAPTIVE, f"{ADAPTIVE},offload.policy=arc", f"{ADAPTIVE},offload.threshold=2"),
            f"{ADAPTIVE},offload.prompt_only=true",
        ),
        ("--trace", _AGENTS, *_COLD),
        users=(96,),
    ),
    Experiment(
        "mix",
        ("stock", ADAPTIVE),
        ("--trace", _AGENTS, "--trace", _CHAT, *_COLD),
        users=(96,),
    ),
    Experiment(
        "openhands-one",
        ("standard", "stock", ADAPTIVE),
        ("--trace", "openhands", "--for", "3m", "--warmup", "45s", "--scale", "1"),
        users=(1,),
        columns=STEPS,
    ),
    Experiment(
        "million",
        ("stock", ADAPTIVE),
        ("--trace", "openhands@1000000", "--for", "20m", "--warmup", "10m", "--scale", "1"),
        users=(8,),
    ),
)
