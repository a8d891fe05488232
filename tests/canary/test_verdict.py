"""Rounding, near ties and corruption are distinguished in recorded answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from side import Scripted, surely

from hisparsed.canary.learning import CanaryMemory
from hisparsed.canary.round import CanaryAnswer, RoundResult
from hisparsed.canary.verdict import (
    LEAST_ROUNDS,
    MOST_ANSWERS,
    Finding,
    Position,
    RecordedAnswer,
    judge,
    judge_answer,
    learn,
    plausible,
)
from hisparsed.control.status.document import CanaryState
from hisparsed.engine.messages import CanaryReport
from hisparsed.policy.signals import EngineReport, Lever
from tests.bench.canary import ANSWER, canary_prompt
from tests.bench.canary_noise import HARMS, Recorder

NOISE = 0.02
LENGTH = 12
MARGIN = 0.3


def best_of(tokens: Sequence[int]) -> list[tuple[int, dict[int, float]]]:
    """The answer of an exact node: each token, and two less likely ones."""
    return [(one, {one: -0.5, one + 1: -0.5 - MARGIN, one + 2: -2.0}) for one in tokens]


def rounded(
    rng: random.Random, exact: Sequence[tuple[int, dict[int, float]]], *, harm: float = 0.0
) -> RecordedAnswer:
    """``exact`` as a kernel would give it; ``harm`` moves every log probability by about so
    much, the same way whenever it is read."""
    fixed = random.Random(1)
    return tuple(
        Position(
            token,
            {
                one: at + rng.gauss(0, NOISE) + harm * fixed.choice((-1, 1))
                for one, at in best.items()
            },
        )
        for token, best in exact
    )


EXACT = best_of(range(10, 10 + 3 * LENGTH, 3))


def clean(rng: random.Random, count: int) -> list[RecordedAnswer]:
    return [rounded(rng, EXACT) for _ in range(count)]


def test_what_rounding_does_is_clean() -> None:
    rng = random.Random(2)
    baseline = learn(clean(rng, 3 * LEAST_ROUNDS))
    assert baseline.noise == pytest.approx(NOISE, rel=0.2)
    assert baseline.tokens == tuple(token for token, _ in EXACT)
    found = {judge(baseline, (rounded(rng, EXACT),)) for _ in range(1_000)}
    assert found == {Finding.CLEAN}


def test_harm_of_several_times_the_noise_is_asked_for_again_and_then_certain() -> None:
    rng = random.Random(3)
    baseline = learn(clean(rng, 3 * LEAST_ROUNDS))
    first, second = ((rounded(rng, EXACT, harm=0.08),) for _ in range(2))
    assert judge(baseline, first) is Finding.SUSPECT
    assert judge(baseline, first, second) is Finding.CORRUPT
    assert judge(baseline, first, (rounded(rng, EXACT),)) is Finding.CLEAN


def test_a_suspicion_counts_twice_only_for_the_same_question() -> None:
    rng = random.Random(4)
    baseline = learn(clean(rng, 3 * LEAST_ROUNDS))
    harmed = [rounded(rng, EXACT, harm=0.08) for _ in range(2)]
    (right,) = clean(rng, 1)
    assert judge(baseline, (right, harmed[0]), (harmed[1], right)) is Finding.SUSPECT
    assert judge(baseline, (right, harmed[0]), (right, harmed[1])) is Finding.CORRUPT


def test_great_harm_is_certain_at_once() -> None:
    rng = random.Random(5)
    baseline = learn(clean(rng, 3 * LEAST_ROUNDS))
    assert judge(baseline, (rounded(rng, EXACT, harm=0.4),)) is Finding.CORRUPT


def flipped(at: int, *, below: float) -> list[tuple[int, dict[int, float]]]:
    """The exact answer, but at ``at`` the second token came, which lies so far below."""
    changed = list(EXACT)
    token = changed[at][0]
    changed[at] = (token + 1, {token: -0.5, token + 1: -0.5 - below, token + 2: -2.0})
    return [*changed[: at + 1], *best_of(range(500, 500 + LENGTH - at - 1))]


def test_another_token_at_a_near_tie_is_no_corruption_and_what_follows_is_not_compared() -> None:
    rng = random.Random(6)
    tie = list(EXACT)
    token = tie[4][0]
    tie[4] = (token, {token: -0.5, token + 1: -0.501, token + 2: -2.0})
    baseline = learn([rounded(rng, tie) for _ in range(3 * LEAST_ROUNDS)])
    judged = judge_answer(baseline, rounded(rng, flipped(4, below=0.001)))
    assert judged.near_tie
    assert (judged.place, judged.compared) == (5, 5)
    assert judge(baseline, (rounded(rng, flipped(4, below=0.001)),)) is Finding.CLEAN


def test_another_token_that_lay_far_below_is_certain_whatever_else_was_equal() -> None:
    rng = random.Random(7)
    far = list(EXACT)
    token = far[9][0]
    far[9] = (token, {token: -0.1, token + 1: -1.5, token + 2: -4.0})
    baseline = learn([rounded(rng, far) for _ in range(3 * LEAST_ROUNDS)])
    wrong = list(far)
    wrong[9] = (token + 1, far[9][1])
    assert judge(baseline, (rounded(rng, wrong),)) is Finding.CORRUPT


def test_both_sides_of_a_tie_are_learned() -> None:
    rng = random.Random(8)
    sides = [EXACT, flipped(3, below=0.001)]
    baseline = learn([rounded(rng, sides[n % 2]) for n in range(3 * LEAST_ROUNDS)])
    for side in sides:
        judged = judge_answer(baseline, rounded(rng, side))
        assert (judged.place, judged.compared) == (None, LENGTH)


def test_an_exact_node_knows_no_rounding() -> None:
    rng = random.Random(9)
    (answer,) = clean(rng, 1)
    baseline = learn([answer], exact=True)
    assert judge(baseline, (answer,)) is Finding.CLEAN
    (other,) = clean(rng, 1)
    assert judge(baseline, (other,)) is Finding.CORRUPT


def test_answers_too_far_apart_for_any_rounding_are_not_learned_from() -> None:
    rng = random.Random(10)
    assert plausible(clean(rng, 9))
    assert not plausible([*clean(rng, 2), *(rounded(rng, EXACT, harm=3.0) for _ in range(2))])
    assert not plausible([surely((1, 2, 3, 4)), surely((1, 9, 3, 4)), surely((1, 2, 3, 4))])


def take(memory: CanaryMemory, answers: Sequence[RecordedAnswer]) -> RoundResult:
    seen = CanaryReport(full=1, mixed=0, none=0, scheduled_tokens=1, step_s=0.0)
    made = tuple(CanaryAnswer(one, 0, seen) for one in answers)
    return memory.take(memory.questions(), made)


def test_nothing_is_judged_before_enough_clean_rounds_and_later_ones_are_learned_too() -> None:
    rng = random.Random(11)
    memory = CanaryMemory((1, 2), LENGTH, exact=False)
    for number in range(LEAST_ROUNDS):
        assert memory.baseline is None, number
        assert memory.wants_more
        assert take(memory, clean(rng, 3)).finding is None
    assert memory.baseline is not None
    assert not memory.wants_more
    for _ in range(LEAST_ROUNDS):
        assert take(memory, clean(rng, 3)).finding is Finding.CLEAN
    assert len(memory.baseline.answers) == MOST_ANSWERS
    harmed = [*clean(rng, 2), rounded(rng, EXACT, harm=0.08)]
    assert take(memory, harmed).finding is Finding.SUSPECT
    assert memory.wants_more
    known = memory.baseline
    harmed = [*clean(rng, 2), rounded(rng, EXACT, harm=0.08)]
    assert take(memory, harmed).finding is Finding.CORRUPT
    assert memory.baseline is known, "nothing is learned from what is not clean"


async def test_a_node_that_rounds_freezes_nothing_while_it_learns(
    make_side: Callable[..., Any], report: EngineReport
) -> None:
    engine = Scripted()
    side = make_side(engine, exact=False)
    engine.reply = lambda question: (9, 9, 9, 9) if question.residency == "none" else (5, 6, 7, 8)
    await side.tick(report)
    assert side.holds.frozen == frozenset()
    assert side.events() == ["canary-suspect"]
    engine.reply = lambda question: (5, 6, 7, 8)
    for _ in range(LEAST_ROUNDS):
        side.now_s += 60
        await side.tick(report)
    assert side.canary.status().state is CanaryState.OK
    assert side.events() == ["canary-suspect", "canary-recorded"]
    engine.reply = lambda question: (9, 9, 9, 9)
    side.now_s += 600
    await side.tick(report)
    assert side.holds.frozen == frozenset(Lever)


@pytest.mark.long
def test_one_wrong_page_of_a_noisy_reference_model_is_found() -> None:
    recorder = Recorder(canary_prompt(), ANSWER, 16, seed=4)
    held = recorder.prefill(4)
    several = [recorder.decode(held) for _ in range(10)]
    *known, fresh = several
    baseline = learn([one for some in known for one in some])
    assert {judge(baseline, (one,)) for one in fresh} == {Finding.CLEAN}
    page = next(harm for harm in HARMS if harm.name == "one page, all layers")
    none, _ = recorder.harmed(held, page)
    rounds = zip(recorder.decode(none), recorder.decode(none), strict=True)
    assert {judge(baseline, (one,), (two,)) for one, two in rounds} == {Finding.CORRUPT}
