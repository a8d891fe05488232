"""Traffic from traces: which prefixes are equal, who plays what, and when."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from small import agents, chat

from hisparsed.errors import UserError
from hisparsed.replay.trace import BlockRun, Call, Session, Trace
from hisparsed.simulate.workload import (
    ClosedLoop,
    Mixed,
    OpenLoop,
    Play,
    TraceSessions,
    is_openhands,
    openhands_trace,
)


def test_the_next_prompt_of_a_session_goes_on_from_prompt_and_answer() -> None:
    first, second = list(TraceSessions(agents(1, 2), 64).play(0, "a"))
    assert len(first.blocks) == (first.input_tokens + first.output_tokens) // 64
    assert first.blocks == second.blocks[: len(first.blocks)]


def test_an_answer_that_is_not_in_the_next_prompt_has_names_of_its_own() -> None:
    calls = (
        Call((BlockRun(0, 4),), 4, 256, 128, 0.0, None),
        Call((BlockRun(100, 8),), 108, 512, 64, 0.0, None),
    )
    sessions = TraceSessions(Trace("t", 64, (Session("s", calls, 0.0),)), 64)
    first, second = list(sessions.play(0, "a"))
    assert not set(first.blocks) & set(second.blocks)


def test_plays_of_one_session_share_nothing_but_common_prompts() -> None:
    common = BlockRun(7 << 40, 3)
    sessions = [
        Session(
            f"s{number}",
            (Call((common, BlockRun(number << 40, 2)), (number << 40) + 2, 320, 64, 0.0, None),),
            0.0,
        )
        for number in (1, 2)
    ]
    played = TraceSessions(Trace("t", 64, tuple(sessions)), 64)
    (one,), (again,) = list(played.play(0, "a")), list(played.play(0, "b"))
    assert one.blocks[:3] == again.blocks[:3]
    assert not set(one.blocks[3:]) & set(again.blocks[3:])


def test_larger_blocks_of_a_trace_become_several_of_the_engine() -> None:
    call = Call((BlockRun(0, 2),), 2, 1100, 10, 0.0, None)
    sessions = TraceSessions(Trace("t", 512, (Session("s", (call,), 0.0),)), 64)
    (played,) = list(sessions.play(0, "a"))
    assert len(set(played.blocks)) == len(played.blocks) == 1110 // 64


def test_calls_that_do_not_fit_are_left_out() -> None:
    trace = agents(1, 4)
    sessions = TraceSessions(trace, 64, max_model_len=1850)
    assert [call.input_tokens for call in sessions.play(0, "a")] == [1500, 1700]
    assert sessions.longest == 1800
    with pytest.raises(UserError, match="no call fits 100 tokens"):
        TraceSessions(trace, 64, max_model_len=100)


def test_openhands_may_begin_with_a_prompt_of_any_length() -> None:
    (session,) = openhands_trace("openhands@1000000").sessions
    assert [call.input_tokens for call in session.calls[:2]] == [1_000_000, 1_000_973]
    assert is_openhands("openhands@1000000")
    assert not is_openhands("openhands.jsonl")
    for wrong in ("openhands@", "openhands@63", "openhands@1M", "openhands@-5"):
        with pytest.raises(UserError, match="not a length of a prompt"):
            openhands_trace(wrong)


def test_openhands_is_13_turns_from_74160_tokens() -> None:
    sessions = TraceSessions(openhands_trace(), 64)
    calls = list(sessions.play(0, "a"))
    assert len(calls) == 13
    assert calls[0].input_tokens == 74_160
    assert {call.output_tokens for call in calls} == {220}
    prompts = [call.blocks[: call.input_tokens // 64] for call in calls]
    assert all(after[: len(before)] == before for before, after in pairwise(prompts))


def closed(users: int, seed: int) -> ClosedLoop:
    return ClosedLoop(TraceSessions(agents(5, 3), 64), users, seed, ramp_s=100)


def shape(plays: list[Play]) -> list[tuple[str, int, float]]:
    return [(play.name, play.first_call, play.start_s) for play in plays]


def test_users_begin_inside_sessions_and_are_drawn_by_the_seed() -> None:
    plays = closed(20, 1).first()
    assert len(plays) == 20
    assert all(0 <= play.start_s <= 100 for play in plays)
    assert {play.first_call for play in plays} == {0, 1, 2}
    assert shape(plays) == shape(closed(20, 1).first())
    assert shape(plays) != shape(closed(20, 2).first())


def test_a_user_plays_one_session_after_another_until_its_time_is_over() -> None:
    sessions = TraceSessions(agents(5, 3), 64)
    loop = ClosedLoop(sessions, 1, 0, ramp_s=0, until_s=50)
    (first,) = loop.first()
    second = loop.following(first, 10.0)
    assert second is not None
    assert (second.start_s, second.first_call) == (10.0, 0)
    assert second.name != first.name
    assert loop.following(second, 60.0) is None


def test_recorded_starts_come_load_times_as_fast_and_again() -> None:
    sessions = TraceSessions(chat(4, every_s=10.0), 64)
    assert sessions.has_starts
    loop = OpenLoop(sessions, 0, load=2.0, share=Fraction(1), until_s=30.0)
    assert [play.start_s for play in loop.first()] == [0, 5, 10, 15, 16, 21, 26]


def started(sessions: TraceSessions, seed: int, until_s: float = 400.0) -> list[str]:
    quarter = Fraction(1, 4)
    return [
        play.name
        for play in OpenLoop(sessions, seed, load=1.0, share=quarter, until_s=until_s).first()
    ]


def test_seeds_that_follow_each_other_play_parts_that_share_no_session() -> None:
    sessions = TraceSessions(chat(400, every_s=1.0), 64)
    parts = [started(sessions, seed) for seed in range(4)]
    assert sorted(name for part in parts for name in part) == sorted(
        f"{index}.0" for index in range(400)
    )
    assert all(95 <= len(part) <= 105 for part in parts)
    assert started(sessions, 4) not in parts


def test_halves_share_no_session_and_play_at_the_pace_of_the_whole() -> None:
    trace = chat(400, every_s=1.0)
    halves = [TraceSessions(trace, 64, half=half) for half in (1, 2)]
    names = [{session.id for session in one.sessions} for one in halves]
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == 400
    for one in halves:
        assert 95 <= len(started(one, 0)) <= 105
    with pytest.raises(UserError, match="openhands has no session in half 2"):
        TraceSessions(openhands_trace(), 64, half=2)


def test_a_trace_played_again_has_fresh_prefixes_and_another_part() -> None:
    # One prompt in all requests: in the second hour none of it is there.
    call = Call((BlockRun(7, 2),), 8, 1100, 10, 0.0, None)
    trace = Trace("t", 512, tuple(Session(f"{n}", (call,), n * 10.0) for n in range(100)))
    sessions = TraceSessions(trace, 64)
    loop = OpenLoop(sessions, 0, load=1.0, share=Fraction(1), until_s=1200.0)
    first, again = loop.first()[0], loop.first()[-1]
    assert (first.name, again.name[-2:]) == ("0.0", ".1")
    assert not set(next(first.calls).blocks) & set(next(again.calls).blocks)
    names = started(TraceSessions(chat(400, every_s=1.0), 64), 0, until_s=800.0)
    laps = [{name.split(".")[0] for name in names if name.endswith(lap)} for lap in (".0", ".1")]
    assert not laps[0] & laps[1]


def test_a_session_and_its_subagent_have_no_prompts_in_common() -> None:
    calls = [
        Call((BlockRun((3 << 40) + first, 2),), 900 + first, 140, 10, 0.0, None)
        for first in (0, 50)
    ]
    trace = Trace("t", 64, (Session("s", (calls[0],), 0.0), Session("s/a", (calls[1],), 0.0)))
    sessions = TraceSessions(trace, 64)
    (one,), (again,) = list(sessions.play(0, "a")), list(sessions.play(0, "b"))
    assert not set(one.blocks) & set(again.blocks)


def test_mixed_traffic_follows_each_with_its_own_kind() -> None:
    agent = ClosedLoop(TraceSessions(agents(2, 2), 64), 1, 0, ramp_s=0, name="agents/")
    talk = OpenLoop(
        TraceSessions(chat(2, 1.0), 64), 0, load=1, share=Fraction(1), until_s=5, name="chat/"
    )
    mixed = Mixed([agent, talk])
    plays = mixed.first()
    assert [play.name.split("/")[0] for play in plays] == ["agents", *["chat"] * (len(plays) - 1)]
    following = mixed.following(plays[0], 3.0)
    assert following is not None
    assert following.name.startswith("agents/")
    assert mixed.following(plays[1], 3.0) is None
