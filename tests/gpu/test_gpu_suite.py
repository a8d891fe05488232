"""The suite's order of events with stand-ins for steps: no GPU needed, nothing is ever lost."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_steps import STEPS
from gpu_suite import (
    Outcome,
    SkipError,
    Step,
    exit_code,
    outcome_of,
    run_file,
    run_in_process,
    run_suite,
    write_outcome,
)


class Clock:
    """Seconds that a step lets pass."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def step(name: str, run: Callable[[], Any] = dict, **options: Any) -> Step:
    return Step(name, f"what {name} shows", options.pop("limit_s", 60.0), run, **options)


def run(
    steps: list[Step],
    *,
    missing: Callable[[str], str | None] = lambda need: None,
    run_step: Callable[[Step, float], Outcome] = lambda step, seconds: outcome_of(step),
    clock: Clock | None = None,
    within_s: float = 600.0,
) -> dict[str, Any]:
    document = run_suite(
        steps, missing=missing, run_step=run_step, clock_s=clock or Clock(), within_s=within_s
    )
    return json.loads(json.dumps(document))


def statuses(document: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["status"] for one in document["steps"]}


def fail() -> dict[str, Any]:
    raise AssertionError("row 3 is wrong")


def skip() -> dict[str, Any]:
    raise SkipError("no such operator")


def test_a_step_that_fails_or_skips_ends_no_other() -> None:
    document = run([step("a", fail), step("b", skip), step("c", lambda: {"gb_per_s": 3.5})])
    assert statuses(document) == {"a": "failed", "b": "skipped", "c": "passed"}
    assert [one["reason"] for one in document["steps"]] == [
        "AssertionError: row 3 is wrong",
        "no such operator",
        "",
    ]
    assert document["steps"][2]["figures"] == {"gb_per_s": 3.5}
    assert document["summary"] == {"passed": 1, "failed": 1, "skipped": 1}


def test_without_a_gpu_every_step_that_needs_one_says_why() -> None:
    ran: list[str] = []

    def run_step(one: Step, seconds: float) -> Outcome:
        ran.append(one.name)
        return Outcome("passed")

    document = run(
        [step("machine", needs=()), step("kernels"), step("tokens")],
        missing=lambda need: f"no {need} here",
        run_step=run_step,
    )
    assert ran == ["machine"]
    assert {one["reason"] for one in document["steps"][1:]} == {"no gpu here"}
    assert statuses(document) == {"machine": "passed", "kernels": "skipped", "tokens": "skipped"}


def test_steps_share_the_time_and_what_comes_too_late_is_skipped() -> None:
    clock, given = Clock(), {}

    def run_step(one: Step, seconds: float) -> Outcome:
        given[one.name] = seconds
        clock.now_s += 40
        return Outcome("passed")

    steps = [step("a", limit_s=50), step("b", limit_s=90), step("c")]
    document = run(steps, run_step=run_step, clock=clock, within_s=82)
    assert given == {"a": 50, "b": 42}
    assert statuses(document)["c"] == "skipped"
    assert "time was over" in document["steps"][2]["reason"]
    assert [one["seconds"] for one in document["steps"]] == [40, 40, 0]


def test_with_a_card_a_step_that_did_not_run_is_no_success() -> None:
    passed = run([step("a"), step("b")])
    assert exit_code(passed) == 0
    assert exit_code(run([step("a"), step("b", skip)])) == 1
    assert exit_code(run([step("a"), step("b", fail)])) == 1
    late = run([step("a"), step("b")], within_s=1.0)
    assert exit_code(late) == 1, "the suite's time was over"


def test_only_a_second_cards_steps_may_be_left_out() -> None:
    one_card = run(
        [step("a"), step("two", needs=("gpu", "two-gpus"))],
        missing=lambda need: "one GPU" if need == "two-gpus" else None,
    )
    assert exit_code(one_card) == 1
    assert exit_code(one_card, optional=frozenset({"two"})) == 0
    failed = run([step("two", fail, needs=("gpu", "two-gpus"))])
    assert exit_code(failed, optional=frozenset({"two"})) == 1, "left out, not failed"


def test_a_step_that_cannot_even_be_run_is_told_as_failed() -> None:
    def run_step(one: Step, seconds: float) -> Outcome:
        raise OSError("no memory for a process")

    (told,) = run([step("a")], run_step=run_step)["steps"]
    assert told["status"] == "failed"
    assert "OSError: no memory for a process" in told["reason"]


def python(code: str) -> Callable[[Step, Path], list[str]]:
    """A step's process that runs ``code`` with the answer's path in ``sys.argv[1]``."""
    return lambda one, answer: [sys.executable, "-c", code, str(answer)]


def test_a_processs_answer_comes_back_whole(tmp_path: Path) -> None:
    answer = Outcome("passed", "", {"us": 1.5, "names": ["a", "b"], "none": None})
    source = tmp_path / "answer.json"
    write_outcome(source, answer)
    code = f"import shutil, sys; shutil.copy({str(source)!r}, sys.argv[1])"
    assert run_in_process(step("a"), 30, tmp_path, python(code)) == answer


def test_a_process_that_dies_has_failed_with_its_last_lines(tmp_path: Path) -> None:
    code = "import os; print('illegal memory access', flush=True); os.abort()"
    outcome = run_in_process(step("a"), 30, tmp_path, python(code))
    assert outcome.status == "failed"
    assert "it ended with -6 and no answer" in outcome.reason
    assert "illegal memory access" in outcome.reason


def test_a_process_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open(sys.argv[1] + '.pid', 'w').write(str(child.pid))\n"
        "child.wait()\n"
    )
    outcome = run_in_process(step("a"), 5, tmp_path, python(code))
    assert outcome.status == "failed"
    assert outcome.reason.startswith("it took longer than 5 s")
    assert _ends(int((tmp_path / "a.json.pid").read_text()))


def _ends(pid: int) -> bool:
    """Whether the process is gone, or goes within seconds."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], 10)[0])
    finally:
        os.close(watched)


def test_a_stale_answer_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    write_outcome(tmp_path / "a.json", Outcome("passed"))
    assert run_in_process(step("a"), 30, tmp_path, python("pass")).status == "failed"


FILES = {
    "good": "def test_a(record_property):\n    record_property('gb_per_s', 3)\n",
    "bad": "def test_a():\n    assert 1 == 2, 'bytes differ'\ndef test_b():\n    pass\n",
    "skipped": "import pytest\n@pytest.mark.skip('no card')\ndef test_a():\n    pass\n",
    "broken": "import no_such_module\n",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Of ``FILES`` and of one that is not there: each a step, all in one process."""
    folder = tmp_path_factory.mktemp("files")
    for name, text in FILES.items():
        (folder / f"test_{name}.py").write_text(text)
    code = (
        "import sys; from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from gpu_suite import Step, outcome_of, run_file, write_outcome\n"
        f"for name in {[*FILES, 'absent']}:\n"
        f"    path = Path({str(folder)!r}, f'test_{{name}}.py')\n"
        "    found = outcome_of(Step('a', '', 1, lambda: run_file(path)))\n"
        "    write_outcome(path.with_suffix('.json'), found)\n"
    )
    run_in_process(step("a"), 120, folder, python(code))
    told = {one: (folder / f"test_{one}.json").read_text() for one in [*FILES, "absent"]}
    return {name: Outcome(**json.loads(text)) for name, text in told.items()}


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("good", "passed", ""),
        ("bad", "failed", "1 tests failed, first test_a: AssertionError: bytes differ"),
        ("skipped", "skipped", "no card"),
        ("broken", "failed", "no_such_module"),
        ("absent", "skipped", "test_absent.py is not there"),
    ],
)
def test_a_test_file_is_a_step(
    outcomes: dict[str, Outcome], name: str, status: str, says: str
) -> None:
    outcome = outcomes[name]
    assert outcome.status == status
    assert says in outcome.reason
    if name == "good":
        assert outcome.figures == {"tests_passed": 1, "tests_skipped": 0, "gb_per_s": 3}


def test_the_suites_own_steps_are_bounded_and_differ() -> None:
    names = [one.name for one in STEPS]
    assert len(set(names)) == len(names)
    assert all(0 < one.limit_s <= 200 for one in STEPS)
    assert [one.name for one in STEPS if not one.needs] == ["environment"]
    assert run_file.__module__ == "gpu_suite"


def suite(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu", *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card is there")
@pytest.mark.parametrize("arguments", [(), ("--kernels",)], ids=["all", "kernels"])
def test_without_a_card_one_line_says_so(arguments: tuple[str, ...], tmp_path: Path) -> None:
    asked = suite(*arguments, "--json", str(tmp_path / "out.json"))
    assert asked.returncode == 0
    (line,) = asked.stdout.splitlines()
    assert line.startswith("No GPU to run on: ")
    assert not (tmp_path / "out.json").exists()


@pytest.mark.long
def test_the_kernels_alone_are_rehearsed_without_a_card(tmp_path: Path) -> None:
    """Interpreted: the oracle, addresses past 2**31, sizes and registers."""
    out = tmp_path / "out.json"
    asked = suite("--kernels", "--rehearse", "--json", str(out))
    document = json.loads(out.read_text())
    assert statuses(document) == dict.fromkeys(
        ("environment", "oracle", "addresses", "state-size", "registers"), "passed"
    ), asked.stdout
    assert asked.returncode == 0
    figures = {one["name"]: one["figures"] for one in document["steps"]}
    assert figures["oracle"]["loads"] > 0
    assert figures["state-size"]["2x_128k_mb"] <= 100
    assert figures["state-size"]["5x_128k_mb"] <= 150
    assert all(one["registers"] <= 255 for one in figures["registers"]["kernels"])


def test_the_kernels_alone_need_no_vllm_and_end_in_five_minutes() -> None:
    code = (
        "import sys; sys.path[:0] = ['tests/gpu', '.']\n"
        "from kernel_steps import WITHIN_S, kernel_steps\n"
        "assert WITHIN_S < 300\n"
        "print([name for name in ('vllm', 'pytest', 'psutil', 'yaml') if name in sys.modules])\n"
        "print([one.name for one in kernel_steps(rehearse=False)])"
    )
    root = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=root
    )
    imported, names = found.stdout.splitlines()
    assert imported == "[]"
    for name in ("oracle", "graphs", "addresses", "state-size", "registers", "timings", "pinning"):
        assert name in names
