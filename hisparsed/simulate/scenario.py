"""What is simulated: the options of `hisparsed simulate` as node, traffic and time.

Refuses options that contradict each other with ``UserError``. Reads traces and the node
description, and varies the node as asked: worse misses, wider unions, requests that differ. Bytes
are those of the whole node. Imports no vLLM and runs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from hisparsed.config.node_description import NodeDescription, load_node_description
from hisparsed.errors import UserError
from hisparsed.plan.sizing import parse_budget
from hisparsed.policy.units import format_duration
from hisparsed.replay.plan import parse_duration_s, parse_scale
from hisparsed.replay.trace import SHIPPED_TRACE, Trace, load_trace
from hisparsed.simulate.policies import twice
from hisparsed.simulate.workload import TraceSessions, is_openhands, openhands_trace


def parse_factor(option: str, text: str) -> float:
    """``x1.5`` or ``1.5`` as a factor. Raises ``UserError`` naming ``option``."""
    try:
        factor = float(text.removeprefix("x"))
    except ValueError:
        factor = 0.0
    if not 0 < factor <= 10:
        raise UserError(f"{option}: {text!r} is not a factor; write one such as x1.5, up to x10")
    return factor


def varied(
    node: NodeDescription, *, misses: float, union: float, spread: float | None
) -> NodeDescription:
    """``misses`` and ``union`` times those of the description; ``spread`` of single requests,
    the description's where ``None``.

    No more rows miss than are selected, and no union exceeds its rows.
    """
    rows = node.rows
    curve = tuple((ratio, min(1.0, share * misses)) for ratio, share in rows.miss_curve)
    unions = tuple(
        min(float(count), max(1.0, share * union)) for count, share in enumerate(rows.union, 1)
    )
    changed: dict[str, object] = {"miss_curve": curve, "union": unions}
    if spread is not None:
        changed["spread"] = spread
    return node.model_copy(update={"rows": rows.model_copy(update=changed)})


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of traffic; ``users`` are those of the whole node.

    Without ``users`` its sessions start when the trace started them, ``load`` times as fast.
    """

    sessions: TraceSessions
    users: int | None
    load: float = 1.0
    from_s: float = 0.0
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Scenario:
    """Node, traffic and time; bytes are those of the whole node.

    Raises ``UserError`` where the warm-up takes all of the time.
    """

    node: NodeDescription
    traffic: tuple[Traffic, ...]
    host_budget: int
    scale: Fraction = Fraction(1)
    duration_s: float = 3600.0
    warmup_s: float = 600.0
    think_scale: float = 1.0
    offload_prompt_only: bool = False
    max_model_len: int | None = None
    """The engine's limit, in tokens; ``None``: the longest call."""
    users: int | None = None
    """As asked for, of all traffic; results are listed under it and ``load``."""
    load: float | None = None
    """``None`` where nothing starts when a trace says."""

    def __post_init__(self) -> None:
        if self.warmup_s >= self.duration_s:
            raise UserError(
                f"--warmup: {format_duration(self.warmup_s)} leaves nothing to measure of --for "
                f"{format_duration(self.duration_s)}; give less"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest call."""
        return max(one.sessions.longest for one in self.traffic)


DEFAULT_USERS = 64
MOST_USERS = 65_536
_LEAST_LOAD, _MOST_LOAD = 0.001, 100.0


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """The command's options as typed; texts are parsed here."""

    node: str
    traces: Sequence[str]
    then: str | None
    policies: Sequence[str]
    sweep: str | None
    users: Sequence[int]
    loads: Sequence[float]
    scale: str
    duration: str
    warmup: str | None
    seed: int
    seeds: int
    think_scale: float
    host_budget: str | None
    max_model_len: int | None
    prompt_only: bool
    half: int | None
    """1 or 2; ``None``: all sessions."""
    misses: str
    union: str
    curve_spread: float | None
    ttft_limit: str
    itl_limit: str
    check_scale: str | None
    out: Path | None
    as_json: bool


def scenarios_of(options: SimulateOptions) -> list[Scenario]:
    """One for each number of users and each pace. Raises ``UserError``."""
    node = varied(
        load_node_description(options.node),
        misses=parse_factor("--misses", options.misses),
        union=parse_factor("--union", options.union),
        spread=options.curve_spread,
    )
    duration_s = parse_duration_s("--for", options.duration)
    warmup_s = duration_s / 4
    if options.warmup is not None:
        warmup_s = parse_duration_s("--warmup", options.warmup)
    budget = node.host.budget
    if options.host_budget is not None:
        budget = parse_budget("--host-budget", options.host_budget)
    scenario = Scenario(
        node=node,
        traffic=(),
        host_budget=budget,
        scale=parse_scale(options.scale),
        duration_s=duration_s,
        warmup_s=warmup_s,
        think_scale=options.think_scale,
        offload_prompt_only=options.prompt_only,
        max_model_len=options.max_model_len,
    )
    if scenario.scale > 1:
        raise UserError(f"--scale: {options.scale} is more than the whole node; need at most 1")
    _check_numbers(options)
    traces = [_trace(name) for name in options.traces or [str(SHIPPED_TRACE)]]
    after = None if options.then is None else _trace(options.then)
    tokens, longest = node.engine.block_tokens, options.max_model_len
    half = options.half
    sessions = [TraceSessions(trace, tokens, longest, half=half) for trace in traces]
    then = None if after is None else TraceSessions(after, tokens, longest, half=half)
    every = sessions if then is None else [*sessions, then]
    _check_kinds(options, every)
    for played in every:
        if played.has_starts and scenario.scale > played.share:
            raise UserError(
                f"--half: half of {played.name} is not enough traffic for --scale {options.scale}; "
                "use at most 1/2"
            )
    recorded = any(one.has_starts for one in sessions) and not options.users
    counts = [None] if recorded else list(options.users or [DEFAULT_USERS])
    agents = any(not one.has_starts for one in every)
    chat = any(one.has_starts for one in every)
    found = [
        replace(
            scenario,
            traffic=_traffic(sessions, then, users, load, duration_s),
            users=(users or DEFAULT_USERS) if agents else None,
            load=load if chat else None,
        )
        for users in counts
        for load in options.loads or [1.0]
    ]
    if options.users:
        for one in found:
            _check_whole(one)
    return found


def _check_whole(scenario: Scenario) -> None:
    """Half a session cannot be simulated, and rounding would show one number for two."""
    for one in scenario.traffic:
        if one.users is not None and (one.users * scenario.scale).denominator > 1:
            users = scenario.users or one.users
            step = scenario.scale.denominator * (users // one.users)
            raise UserError(
                f"--users: {users} at --scale {scenario.scale} is not a whole number of simulated "
                f"sessions; use a multiple of {step}"
            )


def _check_numbers(options: SimulateOptions) -> None:
    for load in options.loads:
        if not _LEAST_LOAD <= load <= _MOST_LOAD:
            raise UserError(
                f"--load: {load:g} is not right; need a number of {_LEAST_LOAD:g} to {_MOST_LOAD:g}"
            )
    for users in options.users:
        if not 1 <= users <= MOST_USERS:
            raise UserError(f"--users: {users} is not right; need 1 to {MOST_USERS}")
    repeated: tuple[tuple[str, Sequence[float]], ...] = (
        ("--users", options.users),
        ("--load", options.loads),
    )
    for option, values in repeated:
        for value in values:
            if values.count(value) > 1:
                raise twice(option, f"{value:g}")


def _check_kinds(options: SimulateOptions, sessions: Sequence[TraceSessions]) -> None:
    """Users play agents' sessions; recorded chat starts when its trace says."""
    names = ", ".join(one.name for one in sessions)
    if options.loads and not any(one.has_starts for one in sessions):
        raise UserError(
            f"--load: {options.loads[0]:g} is for traces that say when sessions start, and {names} "
            "does not; use --users"
        )
    if options.users and all(one.has_starts for one in sessions):
        raise UserError(
            f"--users: {options.users[0]} is for traces that users play, and {names} says when its "
            "sessions start; use --load"
        )


def _traffic(
    sessions: Sequence[TraceSessions],
    then: TraceSessions | None,
    users: int | None,
    load: float,
    duration_s: float,
) -> tuple[Traffic, ...]:
    """``users`` shared evenly among the traces; ``then`` takes over at half time."""
    change_s = math.inf if then is None else duration_s / 2
    each = None if users is None else max(1, users // len(sessions))
    found = [
        Traffic(one, None if one.has_starts else each or DEFAULT_USERS, load, 0.0, change_s)
        for one in sessions
    ]
    if then is not None:
        own = None if then.has_starts else users or DEFAULT_USERS
        found.append(Traffic(then, own, load, change_s))
    return tuple(found)


def _trace(name: str) -> Trace:
    return openhands_trace(name) if is_openhands(name) else load_trace(Path(name))
