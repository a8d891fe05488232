"""The study: experiments are commands, tables go where the document has their marks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hisparsed.errors import UserError
from hisparsed.simulate.policies import choose_policy
from hisparsed.simulate.results import PolicyResult
from tests.bench.study import (
    EXPERIMENTS,
    Experiment,
    Part,
    against_best,
    markdown,
    parts,
    recovery,
    results_of,
    run_all,
    with_table,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "figures" / "study.md"
RESULT = PolicyResult(
    name="stock",
    users=8,
    seed=0,
    sessions=3,
    calls=10,
    calls_per_hour=120.0,
    throughput=5.0,
    goodput=100.0,
    prefix_hit_tokens=900,
    recomputed_tokens=100,
    preemptions=0,
    occupancy=2.0,
    waiting=0.0,
    ttft_p50_s=0.1,
    ttft_p99_s=2.0,
    itl_p50_s=0.01,
    load=0.5,
    link_use=0.1,
    moves=0,
    refused=0,
    failed=0,
    steps=7,
)
EXPERIMENT = Experiment("one", ("stock",), ("--trace", "{traces}/a.gz"))


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda one: one.name)
def test_every_experiment_has_known_policies_and_a_place(experiment: Experiment) -> None:
    for policy in experiment.policies:
        choose_policy(policy)
    assert with_table(DOCUMENT.read_text("utf-8"), experiment.name, "here\n")


def test_a_table_replaces_the_one_before_and_nothing_else() -> None:
    document = "before\n<!-- table one -->\nold\n<!-- end one -->\nafter\n"
    once = with_table(document, "one", "new\n")
    assert once == "before\n<!-- table one -->\nnew\n<!-- end one -->\nafter\n"
    assert with_table(once, "one", "new\n") == once
    with pytest.raises(UserError, match="no <!-- table two -->"):
        with_table(document, "two", "new\n")


def test_a_table_shows_the_command_without_the_place_of_the_traces() -> None:
    text = markdown(EXPERIMENT, [RESULT])
    assert "`hisparsed simulate --trace TRACES/a.gz --policy stock`" in text
    assert "| policy | users | calls/h | spread | good/h |" in text
    assert "| `stock` | 8 | 120 | - | 100 |" in text


def test_a_table_has_the_columns_that_its_question_needs() -> None:
    few = dataclasses.replace(EXPERIMENT, columns=("moves", "users"))
    assert "| policy | moves | users |\n| --- | --- | --- |\n| `stock` | 0 | 8 |" in markdown(
        few, [RESULT]
    )


def test_results_that_are_there_are_not_run_again(tmp_path: Path) -> None:
    seeds = dataclasses.replace(EXPERIMENT, users=(8, 16), seeds=3)
    todo = parts([seeds], 2)
    for part in todo:
        result = RESULT.model_copy(update={"seed": part.seed, "users": int(part.own[1])})
        document = {"policies": [result.model_dump()]}
        part.path(tmp_path).write_text(json.dumps(document))
    run_all(todo, "nowhere", tmp_path, 2)
    found = results_of(seeds, tmp_path)
    assert [(one.users, one.seed) for one in found] == [(8, 0), (8, 1), (16, 0), (16, 1)]
    assert "--users 8 --users 16 --seeds 2 --policy stock`" in markdown(seeds, found)


def test_the_first_seed_of_everything_comes_before_the_second_of_anything() -> None:
    twice = dataclasses.replace(EXPERIMENT, loads=(0.5, 2.0), seeds=2)
    once = dataclasses.replace(EXPERIMENT, name="other")
    names = [part.path(Path()).stem for part in parts([twice, once])]
    assert names == ["one-0.5-seed0", "one-2-seed0", "other-seed0", "one-0.5-seed1", "one-2-seed1"]


def test_what_has_not_been_run_says_so() -> None:
    assert markdown(EXPERIMENT, []).endswith("--policy stock`: not run yet.\n\n")


def test_a_run_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="study: one-seed0 ended with exit code"):
        run_all([Part(EXPERIMENT, (), 0)], "nowhere", tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_policy_is_held_against_the_other_one_that_is_best_over_all_seeds() -> None:
    found = [
        RESULT.model_copy(update={"name": name, "seed": seed, "calls": calls})
        for seed, name, calls in (
            (0, "policy", 99),
            (0, "90%", 100),
            (0, "95%", 50),
            (1, "policy", 90),
            (1, "90%", 60),
            (1, "95%", 80),
        )
    ]
    text = against_best(found)
    # 95 % is the best of the second seed, and not of both.
    assert "others: 118.1% of `90%` (8, 99% to 150% by seed)." in text
    assert "others: 99.0% of `90%` (8)." in against_best(found[:3])


def test_what_was_best_on_one_half_is_judged_on_the_other() -> None:
    def found(**calls: int) -> list[PolicyResult]:
        return [
            RESULT.model_copy(update={"name": name, "calls": count})
            for name, count in calls.items()
        ]

    here, there = found(policy=96, low=90, high=100), found(policy=99, low=101, high=80)
    text = markdown(dataclasses.replace(EXPERIMENT, tuned_on="other"), here, there)
    assert (
        "Best on `other`: `low`. Here, of the best (`high`): `policy` 96.0%; `low` 90.0%." in text
    )
    assert "Best on" not in markdown(EXPERIMENT, here)


def test_each_half_is_judged_by_the_other_with_the_same_policies() -> None:
    named = {one.name: one for one in EXPERIMENTS}
    halves = [one for one in EXPERIMENTS if one.tuned_on]
    assert len(halves) == 4
    for one in halves:
        other = named[one.tuned_on]
        assert other.policies == one.policies
        assert {one.options[-1], other.options[-1]} == {"1", "2"}


def test_what_followed_a_change_is_told_policy_by_policy() -> None:
    found = [
        RESULT.model_copy(update={"recovered_calls_per_hour": calls, "settled_s": settled_s})
        for calls, settled_s in ((100.0, 20.0), (300.0, 60.0))
    ]
    assert "`stock` 200 calls/h, split at rest after 60s" in recovery(found)
