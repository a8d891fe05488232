"""Starting order under over-subscription, and the live set it is judged by."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hisparsed.engine.admission import OldestTurn, SessionTable, WaitingCall, held_prefix_first

calls = st.lists(
    st.tuples(st.integers(0, 1000), st.floats(0, 100, allow_nan=False)), max_size=30
).map(
    lambda pairs: [WaitingCall(index, cost, waited) for index, (cost, waited) in enumerate(pairs)]
)


@given(calls, st.floats(0.1, 100))
def test_order_is_a_permutation_with_the_aged_first(
    waiting: list[WaitingCall], ageing_s: float
) -> None:
    order = held_prefix_first(waiting, ageing_s)
    assert sorted(order) == list(range(len(waiting)))
    aged = [waiting[index].waited_s >= ageing_s for index in order]
    assert aged == sorted(aged, reverse=True)
    fresh = [waiting[index] for index in order if waiting[index].waited_s < ageing_s]
    assert [call.recompute_tokens for call in fresh] == sorted(
        call.recompute_tokens for call in fresh
    )


def test_cheapest_first_until_a_call_is_old() -> None:
    waiting = [WaitingCall(0, 900, 5.0), WaitingCall(1, 10, 1.0), WaitingCall(2, 500, 31.0)]
    assert held_prefix_first(waiting, ageing_s=30.0) == [2, 1, 0]


def test_the_oldest_goes_first_when_it_is_its_turn() -> None:
    waiting = [WaitingCall(0, 900, 5.0), WaitingCall(1, 10, 1.0), WaitingCall(2, 500, 4.0)]
    assert held_prefix_first(waiting, ageing_s=30.0) == [1, 2, 0]
    assert held_prefix_first(waiting, ageing_s=30.0, oldest_first=True) == [0, 1, 2]
    assert held_prefix_first([], ageing_s=30.0, oldest_first=True) == []


def turns(share: float, *passes: str) -> list[bool]:
    """Whether the oldest is due in each pass; calls are letters, the oldest one first."""
    turn = OldestTurn()
    return [turn.due(waiting, waiting[0], share) for waiting in passes]


def test_the_oldest_is_due_after_so_many_starts_of_others() -> None:
    assert turns(0.25, "abcdef", "acdef", "adef", "af") == [False, False, False, True]


def test_a_turn_stands_until_it_is_taken_and_is_one() -> None:
    passes = ("abcdefgh", "ah", "ahi", "hi", "hij", "hj")
    assert turns(0.5, *passes) == [False, True, True, False, False, False]


def test_the_oldest_that_starts_by_itself_has_had_its_turn() -> None:
    assert turns(0.5, "abcd", "acd", "cd", "cde", "ce", "cf") == [
        False,
        False,
        False,
        False,
        False,
        True,
    ]


def test_without_a_share_nobody_is_ever_due() -> None:
    assert not any(turns(0.0, "abcdef", "ag", "ah", "ai"))


def hashes(session: int, blocks: int) -> list[bytes]:
    return [f"{session}/{block}".encode() for block in range(blocks)]


def test_calls_of_one_session_are_one_session() -> None:
    table = SessionTable(ttl_s=100)
    assert table.start("a", hashes(0, 10), 160, now_s=0) is False
    table.finish("a", hashes(0, 12), 200, now_s=1)
    assert table.knows(hashes(0, 15))
    assert table.start("b", hashes(0, 15), 240, now_s=2) is True
    assert (len(table), table.live_tokens) == (1, 240)


def test_a_prompt_that_continues_without_the_answer_is_the_same_session() -> None:
    table = SessionTable(ttl_s=100)
    table.start("a", hashes(0, 10), 160, now_s=0)
    table.finish("a", [*hashes(0, 10), b"answer"], 180, now_s=1)
    assert table.start("b", [*hashes(0, 10), b"recorded"], 190, now_s=2) is True


def test_sessions_expire_unless_a_call_is_open() -> None:
    table = SessionTable(ttl_s=10)
    table.start("a", hashes(0, 3), 48, now_s=0)
    table.start("b", hashes(1, 3), 50, now_s=0)
    table.finish("a", hashes(0, 3), 48, now_s=1)
    table.expire(now_s=30)
    assert (len(table), table.live_tokens) == (1, 50)
    assert not table.knows(hashes(0, 3))
    table.finish("b", hashes(1, 3), 50, now_s=31)
    table.expire(now_s=60)
    assert (len(table), table.live_tokens) == (0, 0)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 20), st.booleans()), max_size=60),
)
def test_live_tokens_never_drift(events: list[tuple[int, int, bool]]) -> None:
    table = SessionTable(ttl_s=5)
    for step, (session, blocks, finish) in enumerate(events):
        table.start(f"r{step}", hashes(session, blocks), blocks * 16, now_s=step)
        if finish:
            table.finish(f"r{step}", hashes(session, blocks), blocks * 16, now_s=step)
        table.expire(step)
        assert table.live_tokens == sum(s.tokens for s in table._sessions.values())
        assert table.live_tokens >= 0
        marks = {mark for s in table._sessions.values() for mark in s.marks}
        assert set(table._by_mark) <= marks
