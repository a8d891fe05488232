"""A prefix computed on one node and decoded on another gives the tokens of one node."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conversations import (
    BLOCK,
    EngineShape,
    answer_of,
    apply,
    ask,
    build_engine,
    converse,
    finish,
    make_conversations,
    random_command,
    report,
    text,
)
from handoff_pair import Pair, pair

from hisparsed.engine.reference.model_folder import INDEX_ROW_BYTES, ROW_BYTES

pytestmark = pytest.mark.engine

AMPLE = EngineShape()
SMALL = EngineShape(gpu_blocks=420)
ANSWER = 24
LAYERS, GROUPS = 8, 2


PROMPTS = {f"of-{tokens}": text(tokens, tokens) for tokens in (1, 15, 16, 17, 60, 500, 512, 1500)}


def conversations() -> list[Any]:
    return make_conversations(count=6, turns=3, first=400, later=80, answer=ANSWER, seed=3)


def converse_apart(nodes: Pair) -> dict[str, list[list[int]]]:
    """All conversations turn by turn, every prompt computed on one node, answered on the other."""
    talks = conversations()
    for turn in range(len(talks[0].turns)):
        prompts = {}
        for talk in talks:
            talk.prompt = talk.prompt + talk.turns[turn]
            prompts[f"{talk.name}-{turn}"] = talk.prompt
        answers = nodes.handed_over(prompts, ANSWER)
        for talk in talks:
            answer = answers[f"{talk.name}-{turn}"].tokens
            talk.answers.append(answer)
            talk.prompt = talk.prompt + answer
    return {talk.name: talk.answers for talk in talks}


def nothing_is_held(nodes: Pair) -> bool:
    return all(node.blocks_in_use() == (0, 0) for node in (nodes.prefill, nodes.decode))


@pytest.fixture(scope="module")
def on_one_node(folder: Path) -> dict[str, list[list[int]]]:
    """Answers to ``PROMPTS`` and to ``conversations`` of a node that does both."""
    engine = build_engine(folder, AMPLE)
    answers = converse(engine, conversations()).answers
    for name, prompt in PROMPTS.items():
        ask(engine, name, prompt, ANSWER)
    return answers | {name: [answer_of(output)] for name, output in finish(engine).items()}


@pytest.mark.parametrize(
    "decode",
    [
        pytest.param(AMPLE, id="ample slab", marks=pytest.mark.long),
        pytest.param(SMALL, id="small slab"),
    ],
)
def test_prefixes_of_any_length_give_the_tokens_of_one_node(
    folder: Path, on_one_node: dict[str, list[list[int]]], decode: EngineShape
) -> None:
    with pair(folder, AMPLE, decode) as nodes:
        answers = nodes.handed_over(PROMPTS, ANSWER)
        nodes.until("all blocks are free", lambda: nothing_is_held(nodes))
    assert {name: [answer.tokens] for name, answer in answers.items()} == {
        name: on_one_node[name] for name in PROMPTS
    }
    tokens = sum(len(prompt) for prompt in PROMPTS.values())
    size = tokens * (LAYERS * ROW_BYTES + GROUPS * INDEX_ROW_BYTES)
    everything = len(PROMPTS)
    assert nodes.prefill.counts == {
        "offered": everything,
        "read": everything,
        "sent_bytes": size,
    }
    assert nodes.decode.counts == {
        "fetched": everything,
        "fetched_tokens": tokens,
        "fetched_bytes": size,
    }


def test_decode_starts_with_no_residency_and_computes_one_token_of_the_prompt(folder: Path) -> None:
    prompt = PROMPTS["of-1500"]
    with pair(folder, AMPLE, SMALL) as nodes:
        params = nodes.prefilled({"call": prompt})
        before = report(nodes.decode.engine)["progress"]["scheduled_tokens_total"]
        nodes.decode.send("call", prompt, ANSWER, params["call"])
        nodes.until(
            "the call runs", lambda: report(nodes.decode.engine)["requests"]["running"] == 1
        )
        first = report(nodes.decode.engine)
    assert first["requests"]["none"] == 1
    assert first["progress"]["scheduled_tokens_total"] - before == 1
    assert first["hot"]["loads_total"] > 0, (
        "selected rows must have been fetched from the host pool"
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "lent",
    [
        pytest.param(0, id="nothing lent"),
        pytest.param(700, id="most of the pool lent"),
    ],
)
def test_growing_conversations_give_the_tokens_of_one_node(
    folder: Path, on_one_node: dict[str, list[list[int]]], lent: int
) -> None:
    with pair(folder, SMALL, SMALL) as nodes:
        for node in (nodes.prefill, nodes.decode):
            apply(node.engine, {"offload_target_blocks": lent})
        answers = converse_apart(nodes)
        nodes.until("all blocks are free", lambda: nothing_is_held(nodes))
    assert answers == {name: on_one_node[name] for name in answers}
    assert nodes.decode.counts["fetched"] == 18
    assert "failed" not in nodes.decode.counts


def test_only_what_the_decode_node_does_not_hold_travels(folder: Path) -> None:
    first = text(500, seed=1)
    with pair(folder, AMPLE, AMPLE) as nodes:
        answer = nodes.handed_over({"first": first}, ANSWER)["first"].tokens
        counted = dict(nodes.decode.counts)
        second = [*first, *answer, *text(100, seed=2)]
        nodes.handed_over({"second": second}, ANSWER)
    held = (len(first) + len(answer) - 1) // BLOCK * BLOCK
    rest = len(second) - held
    assert nodes.decode.counts["fetched_tokens"] - counted["fetched_tokens"] == rest
    assert nodes.decode.counts["fetched_bytes"] - counted["fetched_bytes"] == rest * (
        LAYERS * ROW_BYTES + GROUPS * INDEX_ROW_BYTES
    )


def test_where_only_indexer_rows_were_lost_only_they_travel(folder: Path) -> None:
    prompt = PROMPTS["of-512"]
    with pair(folder, AMPLE, replace(SMALL, gpu_blocks=260, max_multiplier=1)) as nodes:
        before = nodes.handed_over({"before": prompt}, ANSWER)["before"].tokens
        # Others take the GPU pages of it; without a lent block they are nowhere else.
        for seed in range(3):
            nodes.handed_over({f"other-{seed}": text(1900, seed=seed)}, 2)
        counted = dict(nodes.decode.counts)
        again = nodes.handed_over({"again": prompt}, ANSWER)["again"].tokens
    assert again == before
    tokens = nodes.decode.counts["fetched_tokens"] - counted["fetched_tokens"]
    assert tokens == len(prompt)
    # The host pool holds all full pages but the last, whose last token is computed again.
    rows = BLOCK * LAYERS * ROW_BYTES
    index = len(prompt) * GROUPS * INDEX_ROW_BYTES
    assert nodes.decode.counts["fetched_bytes"] - counted["fetched_bytes"] == rows + index


def test_nodes_may_differ_in_block_size(
    folder: Path, on_one_node: dict[str, list[list[int]]]
) -> None:
    with pair(folder, replace(AMPLE, block_size=32), SMALL) as nodes:
        answers = nodes.handed_over(PROMPTS, ANSWER)
    assert {name: [answer.tokens] for name, answer in answers.items()} == {
        name: on_one_node[name] for name in PROMPTS
    }
    assert nodes.decode.counts["fetched"] == len(PROMPTS)


@pytest.mark.long
def test_a_decode_node_may_speculate_on_a_prefix_from_elsewhere(
    folder: Path, on_one_node: dict[str, list[list[int]]]
) -> None:
    with pair(folder, AMPLE, replace(SMALL, gpu_blocks=700, speculative_tokens=3)) as nodes:
        answers = nodes.handed_over(PROMPTS, ANSWER)
    assert {name: [answer.tokens] for name, answer in answers.items()} == {
        name: on_one_node[name] for name in PROMPTS
    }
    assert nodes.decode.counts["fetched"] == len(PROMPTS)


@pytest.mark.parametrize(
    "eager",
    [
        pytest.param(True, id="eager mirror", marks=pytest.mark.long),
        pytest.param(False, id="no eager mirror"),
    ],
)
def test_a_prefix_that_ended_in_a_chunk_of_one_token_is_whole(
    folder: Path, on_one_node: dict[str, list[list[int]]], eager: bool
) -> None:
    # Shorter than top-k: every row that arrived is read. The prompt ends inside a page, so that the
    # last row is read, not recomputed.
    prompt, first = PROMPTS["of-60"], PROMPTS["of-60"][:50]
    odd = replace(AMPLE, max_num_batched_tokens=49, max_num_seqs=1, eager_host_mirror=eager)
    with pair(folder, odd, SMALL) as nodes:
        params = nodes.prefilled({"of-60": first})
        answer = nodes.decoded({"of-60": prompt}, params, ANSWER)["of-60"]
    assert [answer.tokens] == on_one_node["of-60"]
    assert nodes.decode.counts["fetched_tokens"] == len(first)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_levers_moved_at_random_on_both_nodes_give_the_same_tokens(
    folder: Path, on_one_node: dict[str, list[list[int]]], seed: int
) -> None:
    shape = EngineShape(gpu_blocks=420, host_budget_bytes=20 << 20, ack_lag_steps=3)
    rng = random.Random(seed)
    moves = 0

    def move(step: int) -> None:
        nonlocal moves
        if step % 3:
            return
        node = rng.choice([nodes.prefill, nodes.decode])
        moves += 1
        budget = report(node.engine)["geometry"]["budget_blocks"]
        apply(node.engine, random_command(rng, budget))

    with pair(folder, shape, shape) as nodes:
        nodes.between_steps = move
        answers = converse_apart(nodes)
        reports = [report(node.engine) for node in (nodes.prefill, nodes.decode)]
        nodes.until("all blocks are free", lambda: nothing_is_held(nodes))
    assert answers == {name: on_one_node[name] for name in answers}
    assert moves > 20
    assert [one["ledger"]["violations_total"] for one in reports] == [0, 0]
