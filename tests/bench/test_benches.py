"""The benches run, give every law and backend work, and say what they measured."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hisparsed.policy.decide import decide
from hisparsed.policy.decisions import Reason
from hisparsed.policy.memory import Memory
from hisparsed.policy.signals import Lever
from tests.bench import kernels, step_cpu
from tests.bench.kernels_work import Case
from tests.bench.policy import busy_policy, measure, snapshots


def test_it_counts_ticks_and_moves() -> None:
    figures = measure(200)
    assert figures.ticks == 200
    assert 0 < figures.moves <= 200
    assert 0 < figures.decide_p50_us <= figures.decide_p99_us <= figures.decide_max_us


def test_its_node_has_work_for_the_laws() -> None:
    memory, codes = Memory(), set()
    for snapshot in snapshots(400):
        decision, memory = decide(busy_policy(), snapshot, memory)
        codes |= {one.reason for one in decision.levers}
    assert {Reason.SHARED_BY_GAIN, Reason.COVERAGE_LOW} <= codes
    assert "offload_gain_tokens_per_minute" in decision.of(Lever.SPLIT).figures


def test_json_on_the_command_line() -> None:
    command = [sys.executable, "-m", "tests.bench.policy", "--json", "--ticks", "50"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(out)["ticks"] == 50


@pytest.mark.usefixtures("cpp_is_built")
def test_bench_reports_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Case(k=32, capacity=128, q=1, requests=1)
    monkeypatch.setattr(kernels, "REFERENCE", small)
    monkeypatch.setattr(kernels, "CASES", (small, Case(k=16, capacity=64, q=2, requests=2)))
    figures = kernels.measure(steps=32, repeats=1)
    assert {"rows", "cpp_over_torch", "octile_overhead", "gather_over_memcpy"} <= set(figures)
    assert {"backend", "k", "capacity", "q", "us_per_request"} <= set(figures["rows"][0])
    backends_run = {row["backend"] for row in figures["rows"]}
    assert backends_run >= {"torch", "cpp"}
    ratios = {row["miss_ratio"] for row in figures["rows"] if row["q"] == 1}
    assert len(ratios) == 1, "every backend must have done the same work"
    assert "us/request" in kernels.table(figures)


@pytest.mark.long
@pytest.mark.engine
def test_the_engine_core_bench_times_the_same_steps_of_all_three(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("HISPARSED_ENGINE", "1")
    load = step_cpu.Load(users=4, first_tokens=(4_000, 9_000), answer_tokens=(20, 40))
    found = step_cpu.measure(load, steps=60)
    for phase in ("prompts", "decoding"):
        kinds = found["phases"][phase]["both"]
        assert set(kinds) == set(step_cpu.KINDS)
        assert len({(one["steps"], one["running"]) for one in kinds.values()}) == 1
        assert all(0 < one["p50_ms"] <= one["p99_ms"] for one in kinds.values())
    assert "prompts, both, hisparsed" in step_cpu.in_words(found)
    assert set(found["core"]) == set(step_cpu.KINDS)


def test_core_figures_are_found_again() -> None:
    work = [(tokens, calls) for tokens in (0, 64, 700, 8_192) for calls in (1, 8, 16)]
    times_s = [0.002 + calls * 0.0001 + tokens * 2e-6 for tokens, calls in work]
    assert step_cpu.core_figures(times_s, work) == {
        "step_ms": 2.0, "request_ms": 0.1, "token_us": 2.0,
    }  # fmt: skip
    free = [calls * 0.0001 for _, calls in work]
    assert step_cpu.core_figures(free, work)["request_ms"] == 0.1
