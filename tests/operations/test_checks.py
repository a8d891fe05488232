"""Each check of the doctor at its edge: what is correct, what is not, and how severe it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hisparsed.control.status.document import Severity
from hisparsed.engine.cuda.checks import GpuFacts, MachineFacts, machine_problems
from hisparsed.engine.cuda.proof.question import ChunkProof, HotProof, Proof, Timing
from hisparsed.operations.checks import (
    CHECKS,
    GPU_IDLE_BYTES,
    Finding,
    examine,
    exit_code,
    findings_document,
    findings_text,
)
from hisparsed.operations.machine import Gpu, Orphan, ShmFile

GIB = 2**30
LEAK = Path("/dev/shm/vllm_offload_hisparse_a_dp0.mmap")  # noqa: S108 (only a name)
H200 = 141 * GIB


def bad(question: Any) -> dict[str, Severity]:
    """What is not well, by check."""
    return {one.check: one.severity for one in examine(question) if one.severity is not Severity.OK}


def test_a_sound_machine_has_every_check_and_nothing_to_say(ask: Any) -> None:
    findings = examine(ask())
    assert [one.check for one in findings] == list(CHECKS)
    assert {one.severity for one in findings} == {Severity.OK}
    assert exit_code(findings, fatal_only=False) == 0


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ({"available_bytes": 1536 * GIB - 1}, {"memory": Severity.FATAL}),
        # vLLM takes at most 95% of what is free, and the start is refused.
        ({"available_bytes": 1616 * GIB}, {"memory": Severity.FATAL}),
        ({"available_bytes": 1617 * GIB}, {"memory": Severity.WARNING}),
        ({"available_bytes": 1536 * GIB + 2048 * GIB // 20 - 1}, {"memory": Severity.WARNING}),
        ({"available_bytes": 1536 * GIB + 2048 * GIB // 20}, {}),
        ({"memory_bytes": 1536 * GIB - 1}, {"memory": Severity.FATAL}),
        ({"memory_bytes": 1630 * GIB, "available_bytes": 1617 * GIB}, {"memory": Severity.WARNING}),
        ({"shm_free_bytes": 1536 * GIB + 2080 * 2**20}, {}),
        (
            {"shm_free_bytes": 1536 * GIB + 2080 * 2**20 - 1},
            {"shared-memory": Severity.WARNING},
        ),
        ({"shm_free_bytes": 1536 * GIB}, {"shared-memory": Severity.WARNING}),
        ({"shm_free_bytes": 1536 * GIB - 1}, {"shared-memory": Severity.FATAL}),
        ({"memlock_bytes": 1536 * GIB}, {}),
        ({"memlock_bytes": 8 * 2**20}, {"memlock": Severity.WARNING}),
        ({"numa_free_bytes": (500 * GIB, 1000 * GIB)}, {}),
        ({"numa_free_bytes": (499 * GIB, 1000 * GIB)}, {"numa": Severity.WARNING}),
        ({"numa_free_bytes": (0, 1000 * GIB)}, {"numa": Severity.WARNING}),
        ({"numa_free_bytes": (1000 * GIB,)}, {}),
        ({"huge_pages": "always"}, {}),
        ({"huge_pages": "never"}, {"huge-pages": Severity.NOTE}),
        ({"huge_reserved_bytes": GIB, "huge_free_bytes": GIB}, {"huge-pages": Severity.NOTE}),
        (
            {"huge_reserved_bytes": GIB, "huge_free_bytes": 0, "available_bytes": 1620 * GIB},
            {"huge-pages": Severity.NOTE, "memory": Severity.WARNING},
        ),
        (
            {"huge_reserved_bytes": GIB, "huge_free_bytes": GIB, "available_bytes": 1620 * GIB},
            {"huge-pages": Severity.WARNING, "memory": Severity.WARNING},
        ),
        ({"gpus": (Gpu("H200", H200, 0, 0),) * 7}, {"gpus": Severity.FATAL}),
        ({"gpus": (Gpu("H200", H200, GPU_IDLE_BYTES, 0),) * 8}, {}),
        ({"gpus": (Gpu("H200", H200, GPU_IDLE_BYTES + 1, 0),) * 8}, {"gpus": Severity.WARNING}),
        ({"gpus": (Gpu("H200", H200, 0, 1),) * 8}, {"gpus": Severity.WARNING}),
        ({"taken_ports": ("api.port: taken",)}, {"ports": Severity.FATAL}),
        ({"daemon_answers": True, "taken_ports": ("x",)}, {"daemon": Severity.FATAL}),
        ({"state_trouble": "state_dir: no"}, {"daemon": Severity.FATAL}),
        ({"vllm": None}, {"vllm": Severity.FATAL}),
        ({"vllm": "0.29.0"}, {"vllm": Severity.FATAL}),
        ({"vllm": "0.30.0"}, {}),
        ({"disk_free_bytes": 512 * 2**20}, {}),
        ({"disk_free_bytes": 512 * 2**20 - 1}, {"journal-disk": Severity.WARNING}),
        ({"unix_s": 998_999.0}, {"clock": Severity.WARNING}),
        ({"clock_kept": False}, {"clock": Severity.NOTE}),
        ({"clock_kept": None}, {}),
        ({"dead_folder": Path("/tmp/hisparsed-run-a")}, {"dead-daemon": Severity.NOTE}),  # noqa: S108
        ({"dead_socket": Path("/run/control.sock")}, {"dead-daemon": Severity.NOTE}),
        ({"orphans": (Orphan(7, "VLLM::EngineCore"),)}, {"orphans": Severity.WARNING}),
        ({"shared_files": (ShmFile(LEAK, GIB, True),)}, {}),
        ({"shared_files": (ShmFile(LEAK, GIB, False),)}, {"leaked-memory": Severity.WARNING}),
        ({"shared_files": (ShmFile(LEAK, GIB, None),)}, {"leaked-memory": Severity.WARNING}),
    ],
    ids=str,
)
def test_a_check_at_its_edge(
    ask: Any, machine: dict[str, Any], expected: dict[str, Severity]
) -> None:
    assert bad(ask(machine)) == expected


def test_a_reference_node_is_not_asked_for_what_only_pinning_needs(ask: Any) -> None:
    machine = {
        "gpus": (),
        "memlock_bytes": 0,
        "shm_free_bytes": 0,
        "kernel": "6.12.1",
        "numa_free_bytes": (0, GIB),
        "huge_pages": "never",
    }
    assert bad(ask(machine, kind="reference", node="reference", host_budget="64MiB")) == {}


@pytest.mark.parametrize(
    ("machine", "budget", "words"),
    [
        # Reports of operators: a container whose other processes had taken most of its memory, and
        # a machine that the budget would fill to the last.
        (
            {"memory_bytes": 2000 * 2**20, "available_bytes": 771 * 2**20},
            "256MiB",
            "leaves 515MiB of the 771MiB that are free",
        ),
        (
            {"memory_bytes": 24 * GIB, "available_bytes": int(22.39 * GIB)},
            "22GiB",
            "leaves 399.36MiB of the 22.39GiB that are free",
        ),
    ],
)
def test_a_budget_that_leaves_the_node_s_own_processes_no_room_is_fatal(
    ask: Any, machine: dict[str, int], budget: str, words: str
) -> None:
    question = ask(machine, kind="reference", node="reference", host_budget=budget)
    (found,) = [one for one in examine(question) if one.check == "memory"]
    assert found.severity is Severity.FATAL
    assert words in found.what
    assert "the node's own processes take 1GiB" in found.why


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("share", [90, 94, 96, 99, 101])
@pytest.mark.parametrize("shm", [99, 100])
def test_what_a_start_refuses_of_memory_is_fatal(
    ask: Any, ranks: int, share: int, shm: int
) -> None:
    """``share``: of what is free, in percent; ``shm``: of the budget."""
    budget = 1536 * GIB
    machine = {"available_bytes": budget * 100 // share, "shm_free_bytes": budget * shm // 100}
    question = ask(machine, cuda={"tensor_parallel_size": ranks})
    facts = MachineFacts(**machine, gpus=(GpuFacts(GIB),) * ranks)
    refused = list(machine_problems(question.config, facts))
    found = [name for name, how in bad(question).items() if how is Severity.FATAL]
    assert bool(refused) == bool(set(found) & {"memory", "shared-memory"})


def test_one_rank_keeps_its_pool_to_itself(ask: Any) -> None:
    machine = {"shm_free_bytes": 0}
    assert bad(ask(machine, cuda={"tensor_parallel_size": 1})) == {}


def test_every_finding_says_what_why_and_how(ask: Any) -> None:
    machine = {
        "available_bytes": 0,
        "shm_free_bytes": 0,
        "memlock_bytes": 0,
        "gpus": (),
        "vllm": "0.1",
        "numa_free_bytes": (0, GIB),
        "shared_files": (ShmFile(LEAK, GIB, None),),
        "disk_free_bytes": 0,
        "clock_kept": False,
    }
    found = [one for one in examine(ask(machine)) if one.severity is not Severity.OK]
    assert len(found) == 9
    for one in found:
        assert one.what, one.check
        assert one.why, one.check
        assert one.fix, one.check


def finding(severity: Severity, *, fixed: bool = False) -> Finding:
    return Finding("memlock", severity, "what it is", "why it matters", "how to fix", fixed)


@pytest.mark.parametrize(
    ("severities", "strict", "fatal_only"),
    [
        ([], 0, 0),
        ([Severity.OK, Severity.NOTE], 0, 0),
        ([Severity.WARNING], 1, 0),
        ([Severity.WARNING, Severity.FATAL], 3, 3),
    ],
)
def test_exit_codes(severities: list[Severity], strict: int, fatal_only: int) -> None:
    findings = [finding(severity) for severity in severities]
    assert exit_code(findings, fatal_only=False) == strict
    assert exit_code(findings, fatal_only=True) == fatal_only


def test_what_was_put_right_counts_no_more() -> None:
    findings = [finding(Severity.WARNING, fixed=True)]
    assert exit_code(findings, fatal_only=False) == 0
    assert findings_document(findings, node="n")["counts"]["warning"] == 0
    assert "fix:" not in findings_text(findings, node="n", every=False)


def test_the_worst_comes_first_and_what_is_well_on_request() -> None:
    findings = [finding(Severity.OK), finding(Severity.WARNING), finding(Severity.FATAL)]
    text = findings_text(findings, node="cuda node", every=False)
    words = [line.split()[0] for line in text.splitlines() if not line.startswith(" ")]
    assert words == ["fatal", "warning", "cuda"]
    assert text.splitlines()[1].strip() == "why: why it matters"
    assert text.splitlines()[-1] == "cuda node: 1 check, 1 fatal, 1 warning."
    assert "ok       memlock" in findings_text(findings, node="n", every=True)


def test_a_long_finding_goes_on_below_itself() -> None:
    long = Finding("memlock", Severity.FATAL, "what " * 30, "why " * 30, "https://" + "x" * 90)
    lines = findings_text([long], node="n", every=False, width=80).splitlines()[:-1]
    assert all(len(line) <= 80 for line in lines if "https" not in line)
    assert lines[0].startswith("fatal    memlock        what what")
    assert lines[1].startswith(" " * 24 + "what")
    assert [line.index("why why") for line in lines if "why why" in line][1:] == [29] * 2
    assert lines[-1] == " " * 24 + "fix: https://" + "x" * 90, "what is copied stays whole"


RIGHT = Proof(
    device=0,
    hot=HotProof(rows=9, timings=(Timing(requests=1, ours_us=90.0, vllm_us=100.0),)),
    chunks=ChunkProof(chunks=9),
)
SLOW = RIGHT.model_copy(
    update={"hot": HotProof(rows=9, timings=(Timing(requests=1, ours_us=130.0, vllm_us=100.0),))}
)
LOST = RIGHT.model_copy(update={"chunks": ChunkProof(difference="chunk 7")})


@pytest.mark.parametrize(
    ("machine", "kernels", "says"),
    [
        ({}, "auto", []),
        ({"proofs": (RIGHT,)}, "auto", []),
        ({"proofs": (SLOW,)}, "auto", ["hisparsed's kernels take 1.30 of vLLM's time"]),
        ({"proofs": (SLOW,)}, "vllm", []),
        ({"proofs": (SLOW,)}, "hisparsed", ["hisparsed's kernels take 1.30 of vLLM's time"]),
        ({"proofs": (LOST,)}, "auto", ["copies of indexer chunks: on GPU 0"]),
        ({"proofs": (LOST,)}, "vllm", ["copies of indexer chunks: on GPU 0"]),
        ({"proofs": (RIGHT,), "kernels_doubt": "the canary"}, "auto", ["the canary"]),
        ({"proofs": (RIGHT,), "kernels_doubt": "the canary"}, "vllm", []),
        ({"proofs": (RIGHT.model_copy(update={"hot": None}),)}, "auto", []),
    ],
)
def test_what_the_gpus_have_proved_is_a_finding_where_it_keeps_something_out_of_use(
    ask: Any, machine: dict[str, Any], kernels: str, says: list[str]
) -> None:
    cuda = {"tensor_parallel_size": 8, "kernels": kernels}
    found = [one for one in examine(ask(machine=machine, cuda=cuda)) if one.check == "kernels"]
    told = [one for one in found if one.severity is Severity.WARNING]
    assert len(told) == len(says)
    assert all(words in one.what for words, one in zip(says, told, strict=True))
    assert all("kernels.json" in one.fix for one in told)
