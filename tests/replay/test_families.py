"""Families of sessions, and parts of a trace: every session once, families whole, rates right."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparsed.replay.families import (
    COMMON_SESSIONS,
    families_of,
    parts_of,
    prompt_blocks,
    seen_share,
    split,
)
from hisparsed.replay.trace import BlockRun, Call, Session, load_trace

TRACES_ENV = "HISPARSED_TRACES"
"""A folder with mooncake-conversation.jsonl.gz, for the figures of recorded chat."""


def turn(number: int, blocks: list[int], start_s: float = 0.0, answer: int = 100) -> Session:
    """One chat call; the last of ``blocks`` is not full."""
    runs = tuple(BlockRun(block, 1) for block in blocks[:-1])
    call = Call(runs, blocks[-1], len(blocks) * 512 - 200, answer, 0.0, None)
    return Session(f"s{number}", (call,), start_s)


def chats(sizes: list[int], seed: int = 0, system: int = 1) -> list[Session]:
    """Conversations of the given numbers of turns, mixed in time, all after ``system`` common
    blocks."""
    draw, timed, fresh = Random(seed), [], 1_000
    for turns in sizes:
        blocks, at_s = list(range(system)), draw.random() * 3000
        for _ in range(turns):
            added = draw.randrange(1, 6)
            blocks = [*blocks, *range(fresh, fresh + added)]
            fresh += added
            timed.append((at_s, blocks))
            at_s += draw.random() * 200
    return [turn(number, blocks, at_s) for number, (at_s, blocks) in enumerate(sorted(timed))]


def blocks_of(session: Session) -> set[int]:
    return {block for call in session.calls for block in prompt_blocks(call)}


def seen(sessions: list[Session]) -> float:
    return seen_share(prompt_blocks(call) for one in sessions for call in one.calls)


def tokens(sessions: list[Session]) -> int:
    return sum(call.input_tokens for one in sessions for call in one.calls)


def test_turns_of_one_conversation_are_one_family_and_a_common_beginning_joins_none() -> None:
    sessions = chats([3] * 40)
    assert len(sessions) > COMMON_SESSIONS
    families = families_of(sessions)
    assert [len(family) for family in families] == [3] * 40
    for family in families:
        assert set.intersection(*(blocks_of(sessions[place]) for place in family)) > {0}


def test_a_beginning_that_few_sessions_have_joins_them() -> None:
    few = [turn(number, [0, 10 + number]) for number in range(COMMON_SESSIONS)]
    assert len(families_of(few)) == 1
    more = [turn(number, [0, 10 + number]) for number in range(COMMON_SESSIONS + 1)]
    assert len(families_of(more)) == len(more)


def test_a_beginning_is_common_by_its_share_in_a_long_trace() -> None:
    others = [turn(number, [100_000 + number]) for number in range(9_880)]
    tenant = [turn(20_000 + number, [7, 8 + number]) for number in range(100)]
    assert max(map(len, families_of([*others, *tenant]))) == 1
    assert max(map(len, families_of([*others, *others[:120], *tenant]))) == 100


def test_a_session_belongs_to_all_that_any_of_its_calls_shares() -> None:
    first, second = turn(0, [1, 2]), turn(1, [5, 6])
    both = Session("both", (*turn(2, [1, 3]).calls, *turn(2, [5, 7]).calls), 0.0)
    assert families_of([first, second, both]) == ((0, 1, 2),)
    assert families_of([first, second]) == ((0,), (1,))


SHARES = st.fractions(min_value=Fraction(1, 12), max_value=1, max_denominator=12)
SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=40)


@given(sizes=SIZES, share=SHARES, seed=st.integers(0, 50))
def test_every_session_is_in_one_part_and_families_are_whole(
    sizes: list[int], share: Fraction, seed: int
) -> None:
    sessions = chats(sizes, seed)
    shares = parts_of(share)
    assert sum(shares) == 1
    assert set(shares[: int(1 / share)]) == {share}
    parts = split(sessions, shares, seed)
    assert len(parts) == len(shares)
    assert sorted(place for part in parts for place in part) == list(range(len(sessions)))
    part_of = {place: number for number, part in enumerate(parts) for place in part}
    for family in families_of(sessions):
        assert len({part_of[place] for place in family}) == 1
    assert parts == split(sessions, shares, seed)


def test_seeds_make_other_parts() -> None:
    sessions = chats([2] * 60)
    halves = (Fraction(1, 2), Fraction(1, 2))
    assert split(sessions, halves, 0) != split(sessions, halves, 1)


def test_a_part_has_its_share_of_tokens_and_of_what_was_seen_although_families_differ() -> None:
    """A tenth of the families has nine tenths of the tokens."""
    sizes = [15 if number % 10 == 0 else 1 for number in range(1500)]
    sessions = chats(sizes, system=2)
    assert tokens([one for one in sessions if len(blocks_of(one)) > 7]) > 0.8 * tokens(sessions)
    share = Fraction(1, 8)
    for window_s, apart in ((1800.0, 0.1), (6000.0, 0.05)):
        whole = [one for one in sessions if one.start_s < window_s]
        for part in split(sessions, parts_of(share), 0):
            own = [sessions[place] for place in part if sessions[place].start_s < window_s]
            assert tokens(own) / tokens(whole) * 8 == pytest.approx(1, abs=apart)
            assert seen(own) == pytest.approx(seen(whole), abs=0.02)


def test_parts_by_session_lose_what_conversations_share() -> None:
    """The purpose of families."""
    sessions = chats([4] * 1000)
    drawn = [one for one in sessions if Random(one.id).random() < 1 / 8]
    assert seen(drawn) < seen(sessions) - 0.1


def test_one_family_larger_than_a_part_stays_whole_and_the_other_parts_share_the_rest() -> None:
    sessions = chats([60, *[1] * 60])
    parts = split(sessions, parts_of(Fraction(1, 4)), 0)
    (large,) = [family for family in families_of(sessions) if len(family) == 60]
    (holder,) = [part for part in parts if set(large) <= set(part)]
    others = [len(part) for part in parts if part != holder]
    assert holder == large
    assert max(others) <= 2 * min(others)


def test_the_shipped_agents_share_prompts_with_few() -> None:
    sessions = load_trace().sessions
    families = families_of(sessions)
    assert (len(sessions), len(families), max(map(len, families))) == (63, 53, 3)


def test_a_part_of_recorded_chat_is_like_the_whole() -> None:
    folder = os.environ.get(TRACES_ENV)
    if not folder:
        pytest.skip(f"{TRACES_ENV} names no folder with recorded chat")
    sessions = load_trace(Path(folder) / "mooncake-conversation.jsonl.gz").sessions
    assert seen(list(sessions)) == pytest.approx(0.366, abs=0.001)
    families = families_of(sessions)
    assert (len(families), max(map(len, families))) == (7373, 43)
    whole = [one for one in sessions if one.start_s < 1200]
    for part in split(sessions, parts_of(Fraction(1, 8)), 0):
        own = [sessions[place] for place in part if sessions[place].start_s < 1200]
        assert tokens(own) / tokens(whole) * 8 == pytest.approx(1, abs=0.02)
        assert seen(own) == pytest.approx(seen(whole), abs=0.02)
