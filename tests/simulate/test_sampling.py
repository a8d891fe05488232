"""How like the whole traffic the part is that a part of a node serves."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from small import agents, chat, small_node

from hisparsed.replay.trace import BlockRun, Call, Session, Trace
from hisparsed.simulate.sampling import Sample, samples_of
from hisparsed.simulate.scenario import Scenario, Traffic
from hisparsed.simulate.workload import TraceSessions


def talks(count: int, turns: int) -> Trace:
    """Chat: turn k of a conversation repeats k blocks and has a new one; 512 tokens each."""
    made = []
    for talk in range(count):
        for turn in range(turns):
            base = talk * 1000
            call = Call(
                (BlockRun(base, turn + 1),), base + 900 + turn, 512 * turn + 600, 50, 0, None
            )
            made.append(Session(f"{talk}.{turn}", (call,), turn * 60.0 + talk))
    return Trace("talks", 512, tuple(made))


def scenario(trace: Trace, users: int | None = None, scale: Fraction = Fraction(1)) -> Scenario:
    traffic = (Traffic(TraceSessions(trace, 64), users),)
    once_s = max(session.start_s for session in trace.sessions) + 1
    return Scenario(small_node(), traffic, 1 << 30, scale, duration_s=once_s, warmup_s=0.5)


def test_a_part_of_chat_has_what_the_whole_has_seen() -> None:
    # Of 2 + 3 + 4 + 5 blocks a conversation asks for 1 + 2 + 3 again.
    (whole,) = samples_of([scenario(talks(80, 4))], [0])
    assert (whole.whole_seen, whole.part_seen, whole.part_rate) == pytest.approx(
        (6 / 14,) * 2 + (1,)
    )
    (part,) = samples_of([scenario(talks(80, 4), scale=Fraction(1, 8))], [0])
    assert part.part_seen == pytest.approx(6 / 14)
    assert part.part_rate == pytest.approx(1)
    assert not part.differs
    assert part.text == (
        "talks x1: 42.9% of the prompt blocks were seen before, 42.9% in the part that is "
        "simulated and 100% of its share of tokens."
    )


def test_a_half_is_held_against_all_of_itself() -> None:
    half = Traffic(TraceSessions(talks(160, 4), 64, half=2), None)
    (part,) = samples_of(
        [replace(scenario(talks(160, 4)), traffic=(half,), scale=Fraction(1, 4))], [0]
    )
    assert part.part_rate == pytest.approx(1, abs=0.03)
    assert part.part_seen == pytest.approx(part.whole_seen, abs=0.01)


def test_what_has_not_started_in_the_time_is_not_counted() -> None:
    short = replace(scenario(talks(20, 4)), duration_s=61, warmup_s=10)
    (first,) = samples_of([short], [0])
    assert first.whole_seen < 0.1


def test_one_conversation_cannot_be_an_eighth_of_itself() -> None:
    (part,) = samples_of([scenario(talks(1, 4), scale=Fraction(1, 8))], [0])
    assert part.part_rate in (0, 8)
    assert part.differs
    assert "Warning: they differ by more than 3 points, or by 5% of the tokens" in part.text


def test_users_play_whole_sessions() -> None:
    (one,) = samples_of([scenario(agents(4, 3), 8, Fraction(1, 4))], [0, 1])
    assert one.whole_seen == pytest.approx(one.part_seen, abs=0.02)
    assert one.part_rate is None
    assert one.text.startswith("agents, 8 users: ")


def test_every_kind_of_traffic_and_every_pace_has_a_sample() -> None:
    mixed = replace(
        scenario(agents(4, 3), 8),
        traffic=(
            Traffic(TraceSessions(agents(4, 3), 64), 8),
            Traffic(TraceSessions(chat(30, 5.0), 64), None, load=2.0),
        ),
    )
    samples = samples_of([mixed, scenario(chat(30, 5.0))], [0])
    assert [(one.trace, one.users, one.load) for one in samples] == [
        ("agents", 8, None),
        ("chat", None, 2.0),
        ("chat", None, 1.0),
    ]
    assert Sample.model_validate(samples[0].model_dump()) == samples[0]
