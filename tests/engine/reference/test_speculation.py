"""Speculative rows: the same tokens as one by one, however many drafts are right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conversations import (
    TOPK,
    Conversation,
    EngineShape,
    Run,
    answer_of,
    apply,
    ask,
    build_engine,
    converse,
    core_of,
    finish,
    make_conversations,
    report,
    text,
)

from hisparsed.engine.reference import hot as hot_module
from hisparsed.engine.reference.requests import RequestState
from hisparsed.engine.scratch import scratch_block_ids

pytestmark = pytest.mark.engine

DRAFTS = 3
QUERY_LEN = 1 + DRAFTS
ONE_TOPK = 1.0
WORST_STEP = float(QUERY_LEN)
VLLM_RESERVATION = QUERY_LEN + 1.0
"""vLLM leases (decode query length + 1) x top-k rows."""
AMPLE_SLAB = EngineShape(speculative_tokens=DRAFTS, max_multiplier=8)
SMALL_SLAB = replace(AMPLE_SLAB, gpu_blocks=420)
LENT_BLOCKS = 700


def conversations() -> list[Conversation]:
    return make_conversations(count=8, turns=3, first=400, later=60, answer=20, seed=5)


class PartlyRight:
    """Drafts from known answers: 0 to all of them right, the others wrong, by position."""

    def __init__(self, answer_of_prompt: dict[tuple[int, ...], list[int]]) -> None:
        self._answers = answer_of_prompt

    def propose(self, requests: Sequence[RequestState]) -> list[list[int]]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: RequestState) -> list[int]:
        answer = self._answers.get(tuple(request.tokens[: request.prompt_len]), [])
        following = answer[request.generated : request.generated + DRAFTS]
        right = len(request.tokens) * 7 % (DRAFTS + 2)
        return [
            token if index < right else (token + 1) % 128 for index, token in enumerate(following)
        ]


def known_answers(run: Run, asked: list[Conversation]) -> dict[tuple[int, ...], list[int]]:
    known: dict[tuple[int, ...], list[int]] = {}
    for conversation in asked:
        prompt: list[int] = []
        for turn, answer in zip(conversation.turns, run.answers[conversation.name], strict=True):
            prompt = prompt + turn
            known[tuple(prompt)] = answer
            prompt = prompt + answer
    return known


@pytest.fixture(scope="module")
def one_by_one(folder: Path) -> Run:
    engine = build_engine(folder, EngineShape())
    apply(engine, {"offload_target_blocks": LENT_BLOCKS})
    return converse(engine, conversations())


def speculating(folder: Path, one_by_one: Run, shape: EngineShape, multiplier: float) -> Any:
    """An engine whose drafts are right about half the time, at ``multiplier``."""
    engine = build_engine(folder, shape)
    core_of(engine).model_executor.draft = PartlyRight(known_answers(one_by_one, conversations()))
    apply(engine, {"offload_target_blocks": LENT_BLOCKS, "multiplier": multiplier})
    return engine


def both_accepted_and_rejected(engine: Any) -> bool:
    counts = core_of(engine).model_executor.draft_counts
    return 0.2 * counts.proposed < counts.accepted < 0.8 * counts.proposed


@pytest.mark.long
def test_n_gram_drafts_change_no_token_and_are_mostly_wrong(folder: Path, one_by_one: Run) -> None:
    engine = build_engine(folder, AMPLE_SLAB)
    assert converse(engine, conversations()).answers == one_by_one.answers
    counts = core_of(engine).model_executor.draft_counts
    assert 0 < counts.accepted < counts.proposed / 4


@pytest.mark.long
def test_accepted_drafts_save_steps(folder: Path, one_by_one: Run) -> None:
    engine = speculating(folder, one_by_one, AMPLE_SLAB, WORST_STEP)
    run = converse(engine, conversations())
    assert run.answers == one_by_one.answers
    assert both_accepted_and_rejected(engine)
    assert run.steps < 0.8 * one_by_one.steps


@pytest.mark.long
@pytest.mark.parametrize(
    "multiplier",
    [1.5, ONE_TOPK, WORST_STEP, VLLM_RESERVATION],
)
def test_host_backed_rows_give_the_same_tokens_at_every_size(
    folder: Path, one_by_one: Run, multiplier: float
) -> None:
    engine = speculating(folder, one_by_one, SMALL_SLAB, multiplier)
    turns = WatchedWaves(engine)
    run = converse(engine, conversations())
    assert run.answers == one_by_one.answers
    assert both_accepted_and_rejected(engine)
    assert "none" in run.residency_seen
    hot = run.last_report["hot"]
    assert hot["multiplier"] == pytest.approx(multiplier)
    assert hot["dropped_total"] == 0
    if multiplier < WORST_STEP:
        assert hot["spills_total"] > 1000, "the rows of a step must not have fitted"
        assert turns.most > 1, "requests must have taken turns with the scratch"
    else:
        assert hot["spills_total"] == 0
        assert turns.most == 1


def test_rejected_rows_never_reach_the_host_where_pages_are_copied_whole(
    folder: Path, one_by_one: Run
) -> None:
    engine = speculating(folder, one_by_one, replace(SMALL_SLAB, eager_host_mirror=False), ONE_TOPK)
    run = converse(engine, conversations())
    assert run.answers == one_by_one.answers
    assert both_accepted_and_rejected(engine)
    assert core_of(engine).model_executor._connectors.spilled_pages > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_moving_everything_at_random_gives_the_same_tokens(
    folder: Path, one_by_one: Run, seed: int
) -> None:
    shape = replace(AMPLE_SLAB, gpu_blocks=340, host_budget_bytes=20 << 20, ack_lag_steps=3)
    engine = speculating(folder, one_by_one, shape, WORST_STEP)
    budget = report(engine)["geometry"]["budget_blocks"]
    rng = random.Random(seed)
    cancelled = Cancelled(engine, rng)

    def disturb(step: int) -> None:
        check_scratch(engine)
        if step % 3 == 0:
            multipliers = [ONE_TOPK, 1.5, 2.0, WORST_STEP, VLLM_RESERVATION, 8.0]
            apply(
                engine,
                {
                    "offload_target_blocks": rng.randrange(budget),
                    "multiplier": rng.choice(multipliers),
                    "watermark": rng.choice([0, 50, 200, "default"]),
                },
            )
        if step % 11 == 0:
            cancelled.another()

    run = converse(engine, conversations(), disturb)
    assert run.answers == one_by_one.answers
    assert both_accepted_and_rejected(engine)
    assert cancelled.count > 5
    assert run.hit_tokens > 0
    assert run.last_report["hot"]["spills_total"] > 0
    assert run.last_report["hot"]["dropped_total"] == 0


@pytest.mark.long
def test_preempted_requests_go_on_with_the_same_tokens(folder: Path) -> None:
    def long_answers() -> list[Conversation]:
        return make_conversations(count=8, turns=1, first=300, later=60, answer=100, seed=5)

    plain = converse(build_engine(folder, EngineShape()), long_answers())
    engine = build_engine(folder, replace(AMPLE_SLAB, gpu_blocks=340))
    core_of(engine).model_executor.draft = PartlyRight(known_answers(plain, long_answers()))
    apply(engine, {"multiplier": ONE_TOPK})
    run = converse(engine, long_answers())
    assert run.answers == plain.answers
    assert run.last_report["requests"]["preemptions_total"] > 0
    assert run.last_report["hot"]["spills_total"] > 0


@pytest.mark.long
def test_the_same_steps_plan_the_same_swaps(
    folder: Path, one_by_one: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[list[Any]] = []
    gather = hot_module.gather

    def record(*arguments: Any) -> None:
        host, physical, counts = arguments[3:]
        rows = [
            (host[row, :count].tolist(), physical[row, :count].tolist())
            for row, count in enumerate(counts.tolist())
        ]
        plans[-1].append(rows)
        gather(*arguments)

    monkeypatch.setattr(hot_module, "gather", record)
    for _ in range(2):
        plans.append([])
        engine = speculating(folder, one_by_one, SMALL_SLAB, ONE_TOPK)
        converse(engine, conversations()[:4])
    assert sum(len(host) for rows in plans[0] for host, _ in rows) > 1000
    assert plans[0] == plans[1]


def test_a_lost_row_is_an_error_not_a_token(folder: Path, one_by_one: Run) -> None:
    engine = speculating(folder, one_by_one, SMALL_SLAB, ONE_TOPK)
    core_of(engine).model_executor._hot._scratch[2:] = 0
    with pytest.raises(RuntimeError, match="a selected row is neither on GPU nor host"):
        converse(engine, conversations())


@pytest.mark.long
def test_sampled_tokens_are_the_same_too(folder: Path) -> None:
    assert sampled_answer(folder, 0) == sampled_answer(folder, DRAFTS)


def test_padding_of_a_whole_prefix_hit_is_not_computed(folder: Path) -> None:
    """vLLM pads a request that starts with one token to the length of speculative ones."""
    engine = build_engine(folder, AMPLE_SLAB)
    executor = core_of(engine).model_executor
    padded: list[tuple[str, int, int]] = []
    segment = executor._segment

    def watch(request_id: str, start: int, count: int, output: Any) -> Any:
        made = segment(request_id, start, count, output)
        if -1 in output.scheduled_spec_decode_tokens.get(request_id, ()):
            padded.append((request_id.split("-", maxsplit=1)[0], count, made.count))
        return made

    executor._segment = watch
    first, again = (
        answered(engine, name, [40 + token % 60 for token in range(321)])
        for name in ("first", "again")
    )
    assert padded == [("again", QUERY_LEN, 1)]
    assert first == again


def sampled_answer(folder: Path, drafts: int) -> list[int]:
    engine = build_engine(folder, EngineShape(speculative_tokens=drafts))
    prompt = [40 + token % 60 for token in range(200)]
    return answered(engine, "sampled", prompt, temperature=1.0, seed=11)


def answered(engine: Any, name: str, prompt: list[int], **sampling: Any) -> list[int]:
    ask(engine, name, prompt, 40, **sampling)
    return answer_of(finish(engine)[name])


class WatchedWaves:
    """The most turns with the scratch in any step."""

    def __init__(self, engine: Any) -> None:
        hot = core_of(engine).model_executor._hot
        self.most = 0
        self._plan = hot._waves
        hot._waves = self._watch

    def _watch(self, *arguments: Any) -> Any:
        waves = self._plan(*arguments)
        self.most = max(self.most, len(waves))
        return waves


class Cancelled:
    """Calls that are cancelled while they run, one after the other."""

    def __init__(self, engine: Any, rng: random.Random) -> None:
        self._engine, self._rng = engine, rng
        self.count = 0

    def another(self) -> None:
        self._engine.abort_request([f"cancelled-{self.count}"])
        self.count += 1
        prompt = text(self._rng.randrange(50, 600), seed=self.count)
        ask(self._engine, f"cancelled-{self.count}", prompt, 1000)


def check_scratch(engine: Any) -> None:
    """Nobody else holds a scratch block, and the pool does not think it free."""
    core = core_of(engine)
    scratch = set(scratch_block_ids(report(engine)["hot"]["scratch_blocks"]))
    assert len(scratch) * 16 == 4 * DRAFTS * TOPK
    manager = core.scheduler.kv_cache_manager
    pool = manager.block_pool
    assert not scratch & {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
    for single in manager.coordinator.single_type_managers[1:]:
        for blocks in single.req_to_blocks.values():
            assert not scratch & {block.block_id for block in blocks}
