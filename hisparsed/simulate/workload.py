"""Traces as calls of a simulated node: block names, pauses, which user plays which session when.

Blocks have names, not tokens: equal names are equal prefixes. The blocks of an answer have the
names that the session's next prompt gives those positions, where that prompt continues this one.
Also makes the OpenHands workload of vLLM's HiSparse measurements from its published sizes. Pure
and seeded. When calls are really sent is decided in ``run``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from random import Random
from typing import Protocol

from hisparsed.errors import UserError
from hisparsed.replay.families import parts_of, prompt_blocks, split
from hisparsed.replay.trace import BlockRun, Call, Session, Trace, block_ids

NAME = "openhands"
TURNS = 13
FIRST_TOKENS = 74_160
LATER_TOKENS = 753
ANSWER_TOKENS = 220
_OPENHANDS_BLOCK_TOKENS = 64


def is_openhands(name: str) -> bool:
    """Whether a trace's name means this workload: openhands, or openhands@TOKENS."""
    return name.partition("@")[0] == NAME


def openhands_trace(name: str = NAME) -> Trace:
    """One session of 13 turns without pauses; every play of it has its own prefix.

    ``openhands@1000000`` has the first prompt so long instead. Raises ``UserError``.
    """
    first, calls = _first_tokens(name), []
    for turn in range(TURNS):
        tokens = first + turn * (LATER_TOKENS + ANSWER_TOKENS)
        full = tokens // _OPENHANDS_BLOCK_TOKENS
        calls.append(
            Call(
                blocks=(BlockRun(0, full),),
                tail_block=full,
                input_tokens=tokens,
                output_tokens=ANSWER_TOKENS,
                think_time_s=0.0,
                api_time_s=None,
            )
        )
    return Trace(name, _OPENHANDS_BLOCK_TOKENS, (Session(name, tuple(calls), 0.0),))


def _first_tokens(name: str) -> int:
    _, given, text = name.partition("@")
    if not given:
        return FIRST_TOKENS
    if not text.isdecimal() or int(text) < _OPENHANDS_BLOCK_TOKENS:
        raise UserError(
            f"--trace {name}: {text!r} is not a length of a prompt; write its tokens, at least "
            f"{_OPENHANDS_BLOCK_TOKENS}, as in openhands@1000000"
        )
    return int(text)


_HALVES_SEED = 0
"""The halves are the same in every run: one is for tuning, the other for judging."""
SPACE_BITS = 40
"""Block ids of a trace carry their name space above these bits."""


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call of a play of a session; ``think_s`` follows the call before it."""

    blocks: Sequence[bytes]
    input_tokens: int
    output_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class Asked:
    """Blocks of the prompts of one session, in blocks of the trace."""

    blocks: int
    own: frozenset[int]
    """Of a play of this session."""
    common: frozenset[int]
    """Of every play of several sessions."""


class TraceSessions:
    """The sessions of one trace as the engine's blocks of ``block_tokens``.

    ``half``, 1 or 2, takes half of the sessions, families whole. Calls longer than
    ``max_model_len`` are omitted. Raises ``UserError`` when none is left.
    """

    def __init__(
        self,
        trace: Trace,
        block_tokens: int,
        max_model_len: int | None = None,
        *,
        half: int | None = None,
    ) -> None:
        if trace.block_tokens % block_tokens:
            raise UserError(
                f"{trace.name}: its blocks of {trace.block_tokens} tokens are not whole blocks of "
                f"{block_tokens}"
            )
        self._parts = trace.block_tokens // block_tokens
        self._block_tokens = block_tokens
        limit = max_model_len or _longest(trace)
        self.share = Fraction(1)
        """Of the trace's sessions that are here, by tokens."""
        played = trace.sessions
        if half is not None:
            self.share = Fraction(1, 2)
            halves = split(played, (self.share, self.share), _HALVES_SEED)
            played = tuple(played[place] for place in halves[half - 1])
            if not played:
                raise UserError(f"--half: {trace.name} has no session in half {half}")
        kept = [_fitting(session, limit) for session in played]
        self.sessions = tuple(session for session in kept if session.calls)
        if not self.sessions:
            raise UserError(f"{trace.name}: no call fits {limit} tokens")
        self.longest = max(
            call.input_tokens + max(1, call.output_tokens)
            for session in self.sessions
            for call in session.calls
        )
        self.name = trace.name
        self.has_starts = any(session.start_s > 0 for session in trace.sessions) and all(
            len(session.calls) == 1 for session in trace.sessions
        )
        """Whether the trace says when its sessions start: recorded chat, not agents."""
        self._shared = frozenset() if self.has_starts else _shared_spaces(self.sessions)
        self._parts_of: dict[tuple[Fraction, int], tuple[tuple[int, ...], ...]] = {}
        self._asked: dict[int, Asked] = {}

    def play(self, index: int, instance: str) -> Iterator[PlannedCall]:
        """The calls of session ``index``; another ``instance`` shares only common prefixes."""
        calls = self.sessions[index].calls
        names = [self._names(call, instance) for call in calls]
        for number, call in enumerate(calls):
            after = names[number + 1] if number + 1 < len(calls) else []
            answer = max(1, call.output_tokens)
            blocks = (call.input_tokens + answer) // self._block_tokens
            own = names[number]
            tail = f"answer {instance} {index} {number} ".encode()
            goes_on = after[: len(own)] == own
            more = after[len(own) : blocks] if goes_on else []
            rest = range(len(own) + len(more), blocks)
            yield PlannedCall(
                [*own, *more, *(tail + b"%d" % block for block in rest)],
                call.input_tokens,
                answer,
                call.think_time_s,
            )

    def part(self, share: Fraction, seed: int) -> tuple[int, ...]:
        """Sessions of a part of a node: whole families, ``share`` of the whole trace's tokens.

        Seeds that follow one another have different parts until each part was used.
        """
        share /= self.share
        if share == 1:
            return tuple(range(len(self.sessions)))
        count = int(1 / share)
        turn, number = divmod(seed, count)
        if (share, turn) not in self._parts_of:
            self._parts_of[share, turn] = split(self.sessions, parts_of(share), turn)
        return self._parts_of[share, turn][number]

    def asked(self, index: int) -> Asked:
        """The prompt blocks of session ``index``."""
        if index in self._asked:
            return self._asked[index]
        blocks, distinct = 0, set[int]()
        for call in self.sessions[index].calls:
            prompt = list(prompt_blocks(call))
            blocks += len(prompt)
            distinct.update(prompt)
        common = frozenset(one for one in distinct if one >> SPACE_BITS in self._shared)
        found = self._asked[index] = Asked(blocks, frozenset(distinct - common), common)
        return found

    def _names(self, call: Call, instance: str) -> list[bytes]:
        """Names of the full blocks of a prompt."""
        salt = f"{instance} ".encode()
        found: list[bytes] = []
        for block in (*block_ids(call.blocks), call.tail_block):
            common = block >> SPACE_BITS in self._shared
            name = b"%d" % block if common else salt + b"%d" % block
            if self._parts == 1:
                found.append(name)
            else:
                found.extend(name + b"/%d" % part for part in range(self._parts))
        return found[: call.input_tokens // self._block_tokens]


def _longest(trace: Trace) -> int:
    return max(
        call.input_tokens + max(1, call.output_tokens)
        for session in trace.sessions
        for call in session.calls
    )


def _fitting(session: Session, limit: int) -> Session:
    calls = tuple(
        call for call in session.calls if call.input_tokens + max(1, call.output_tokens) <= limit
    )
    return Session(session.id, calls, session.start_s)


def _shared_spaces(sessions: Sequence[Session]) -> frozenset[int]:
    """Name spaces whose blocks more than one session has: common prompts.

    A session and its subagents have one space, but not the same blocks.
    """
    owners: dict[int, int] = {}
    shared: set[int] = set()
    for number, session in enumerate(sessions):
        for call in session.calls:
            for run in call.blocks:
                if owners.setdefault(run.first, number) != number:
                    shared.add(run.first >> SPACE_BITS)
    return frozenset(shared)


@dataclass(frozen=True, slots=True)
class Play:
    """One run through a session, beginning at ``start_s``; no call begins after ``until_s``."""

    name: str
    """Names requests; no other play of the run has it."""
    first_call: int
    start_s: float
    until_s: float
    calls: Iterator[PlannedCall]


@dataclass(frozen=True, slots=True)
class Demand:
    """The load of all players, if every session that waits for no other is played to its end."""

    blocks: int
    """Of all prompts, in blocks of the trace."""
    new_blocks: int
    """Blocks that occur for the first time; a cache that loses nothing finds the others."""
    tokens: int
    """Of prompts and answers."""

    @property
    def seen_share(self) -> float:
        return 1 - self.new_blocks / self.blocks if self.blocks else 0.0


class Players(Protocol):
    """The order in which users play sessions."""

    def first(self) -> list[Play]:
        """Sessions that do not wait for another one."""
        ...

    def following(self, ended: Play, now_s: float) -> Play | None:
        """The session that begins because ``ended`` has ended."""
        ...


class ClosedLoop:
    """So many users at a time; each plays one session after another, drawn by the seed.

    The first play of each user begins somewhere inside its session and within ``ramp_s``, so
    that contexts of all ages are there from the start.
    """

    def __init__(
        self,
        sessions: TraceSessions,
        users: int,
        seed: int,
        *,
        ramp_s: float,
        from_s: float = 0.0,
        until_s: float = math.inf,
        name: str = "",
    ) -> None:
        self._sessions = sessions
        self._ramp_s = ramp_s
        self._from_s = from_s
        self._until_s = until_s
        self._name = name
        self._seed = seed
        self._draw = self._draws(users)
        self._user_of: dict[str, int] = {}
        self._laps = [0] * users

    def first(self) -> list[Play]:
        found = []
        for user, draw in enumerate(self._draw):
            session = draw.randrange(len(self._sessions.sessions))
            call = draw.randrange(len(self._sessions.sessions[session].calls))
            start_s = self._from_s + draw.random() * self._ramp_s
            found.append(self._play(user, session, call, start_s))
        return found

    def _draws(self, users: int) -> list[Random]:
        return [Random(f"{self._seed} {self._name} user {user}") for user in range(users)]

    def demand(self) -> Demand:
        """Of the users' first sessions."""
        count = len(self._sessions.sessions)
        drawn = [draw.randrange(count) for draw in self._draws(len(self._laps))]
        return demand_of(self._sessions, [(str(user), one) for user, one in enumerate(drawn)])

    def following(self, ended: Play, now_s: float) -> Play | None:
        user = self._user_of.pop(ended.name)
        session = self._draw[user].randrange(len(self._sessions.sessions))
        return self._play(user, session, 0, now_s) if now_s < self._until_s else None

    def _play(self, user: int, session: int, call: int, start_s: float) -> Play:
        # By user and lap, so that the same calls can be matched under two policies.
        self._laps[user] += 1
        name = f"{self._name}{user}.{self._laps[user]}"
        self._user_of[name] = user
        calls = islice(self._sessions.play(session, name), call, None)
        return Play(name, call, start_s, self._until_s, calls)


class OpenLoop:
    """Sessions start when the trace started them, ``load`` times as fast: a part of them, of
    ``share`` of the tokens.

    The trace is played again, with fresh prefixes and another part, when it ends before
    ``until_s``.
    """

    def __init__(
        self,
        sessions: TraceSessions,
        seed: int,
        *,
        load: float,
        share: Fraction,
        from_s: float = 0.0,
        until_s: float,
        name: str = "",
    ) -> None:
        self._sessions = sessions
        span_s = max(session.start_s for session in sessions.sessions) / load + 1.0
        self._plays: list[Play] = []
        self._played: list[tuple[str, int]] = []
        for lap in range(int((until_s - from_s) // span_s) + 1):
            for index in sessions.part(share, seed + lap):
                start_s = from_s + sessions.sessions[index].start_s / load + lap * span_s
                if start_s < until_s:
                    calls = sessions.play(index, f"{name}{lap}")
                    play = Play(f"{name}{index}.{lap}", 0, start_s, until_s, calls)
                    self._plays.append(play)
                    self._played.append((f"{lap}", index))

    def first(self) -> list[Play]:
        return list(self._plays)

    def demand(self) -> Demand:
        """Of all sessions that start."""
        return demand_of(self._sessions, self._played)

    def following(self, ended: Play, now_s: float) -> Play | None:
        return None


def demand_of(sessions: TraceSessions, plays: Sequence[tuple[str, int]]) -> Demand:
    """Traffic of these plays, each (name of the instance that shares prefixes, session)."""
    blocks = tokens = 0
    own: dict[str, set[int]] = {}
    common: set[int] = set()
    for instance, index in plays:
        asked = sessions.asked(index)
        blocks += asked.blocks
        own.setdefault(instance, set()).update(asked.own)
        common |= asked.common
        tokens += sum(
            call.input_tokens + max(1, call.output_tokens)
            for call in sessions.sessions[index].calls
        )
    return Demand(blocks, len(common) + sum(map(len, own.values())), tokens)


class Mixed:
    """Several kinds of traffic next to or after one another."""

    def __init__(self, parts: Sequence[Players]) -> None:
        self._parts = parts
        self._part_of: dict[str, Players] = {}

    def first(self) -> list[Play]:
        found = []
        for part in self._parts:
            for play in part.first():
                self._part_of[play.name] = part
                found.append(play)
        return found

    def following(self, ended: Play, now_s: float) -> Play | None:
        part = self._part_of.pop(ended.name)
        play = part.following(ended, now_s)
        if play is not None:
            self._part_of[play.name] = part
        return play
