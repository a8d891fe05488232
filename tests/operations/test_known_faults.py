"""The table of known faults: it can be read, has its sources, and concerns the right nodes."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from hisparsed.control.status.document import Severity
from hisparsed.operations.checks import examine
from hisparsed.operations.known_faults import (
    KnownFaults,
    VllmFault,
    load_known_faults,
    parse_version,
)

FAULTS = load_known_faults()


def told(question: Any, check: str) -> list[str]:
    """Ids of the known faults that a check reports."""
    whats = [one.what for one in examine(question) if one.check == check]
    table = (*FAULTS.vllm, *FAULTS.kernel, *FAULTS.driver)
    return [fault.id for fault in table if any(fault.title in what for what in whats)]


def test_ids_are_unique() -> None:
    ids = [fault.id for fault in (*FAULTS.vllm, *FAULTS.kernel, *FAULTS.driver)]
    assert len(ids) == len(set(ids))


def test_a_source_is_a_public_number() -> None:
    entry = {"id": "a", "title": "t", "from": "1", "fixed_in": None, "severity": "fatal"}
    entry |= {"fix": "f", "checked": "2026-01-01"}
    VllmFault.model_validate(entry | {"sources": ["vllm-project/vllm#57019"]})
    for sources in ([], ["a mail"], ["vllm#1"]):
        with pytest.raises(ValidationError):
            VllmFault.model_validate(entry | {"sources": sources})


def test_sources_become_addresses() -> None:
    (fault,) = (fault for fault in FAULTS.vllm if fault.id == "graph-replay-mirror")
    assert fault.links == "https://github.com/vllm-project/vllm/issues/56158"


@pytest.mark.parametrize(
    ("vllm", "budget", "concerned"),
    [
        ("0.30.0", "512GiB", True),
        ("0.30.0", "511GiB", False),
        ("0.31.0", "512GiB", False),
        ("0.30.1.dev3+g5be911ee8", "1TiB", True),
    ],
)
def test_a_fault_ends_with_the_version_that_fixed_it(
    ask: Any, vllm: str, budget: str, concerned: bool
) -> None:
    question = ask({"vllm": vllm}, faults=FAULTS, host_budget=budget)
    assert ("one-registration" in told(question, "vllm")) is concerned


@pytest.mark.parametrize(
    ("arguments", "concerned"),
    [
        ({}, True),
        ({"enforce_eager": False}, True),
        ({"enforce_eager": True}, False),
    ],
)
def test_a_setting_that_avoids_a_fault_silences_it(
    ask: Any, arguments: dict[str, Any], concerned: bool
) -> None:
    drafts = {"speculative_tokens": 3}
    question = ask({"vllm": "0.30.0"}, faults=FAULTS, engine_args=arguments, cuda=drafts)
    assert ("graph-replay-mirror" in told(question, "vllm")) is concerned


@pytest.mark.parametrize(
    ("vllm", "drafts", "concerned"),
    [("0.30.0", 3, True), ("0.30.0", 0, False), ("0.31.0", 3, False), ("0.33.0", 3, False)],
)
def test_a_fault_of_drafts_is_told_where_there_are_some(
    ask: Any, vllm: str, drafts: int, concerned: bool
) -> None:
    question = ask({"vllm": vllm}, faults=FAULTS, cuda={"speculative_tokens": drafts})
    assert ("graph-replay-mirror" in told(question, "vllm")) is concerned


@pytest.mark.parametrize(("ranks", "concerned"), [(1, False), (2, True)])
def test_a_setting_that_triggers_a_fault_is_told(ask: Any, ranks: int, concerned: bool) -> None:
    question = ask(faults=FAULTS, engine_args={"data_parallel_size": ranks})
    assert ("data-parallel-noise" in told(question, "vllm")) is concerned


@pytest.mark.parametrize(
    ("kernel", "concerned"),
    [
        ("6.8.0-124-generic", False),
        ("6.11.0-1013-oem", True),
        ("6.13.12", True),
        ("6.14.0-27-generic", False),
        ("unreadable", False),
    ],
)
def test_kernels_between_the_bounds_are_told(ask: Any, kernel: str, concerned: bool) -> None:
    question = ask({"kernel": kernel}, faults=FAULTS)
    assert ("pin-2-gib" in told(question, "kernel")) is concerned


@pytest.mark.parametrize(("driver", "concerned"), [("575.57.08", False), ("580.82.07", True)])
def test_drivers_from_a_version_on_are_told(ask: Any, driver: str, concerned: bool) -> None:
    question = ask({"driver": driver}, faults=FAULTS)
    assert ("one-registration-512-gib" in told(question, "driver")) is concerned


def test_a_fatal_fault_keeps_the_node_from_starting(ask: Any) -> None:
    fatal = FAULTS.vllm[0].model_copy(update={"fixed_in": None, "severity": "fatal"})
    faults = KnownFaults(vllm=(fatal,), kernel=(), driver=())
    assert Severity.FATAL in {one.severity for one in examine(ask(faults=faults))}


def test_a_reference_node_has_no_faults_of_a_gpu_path(ask: Any) -> None:
    question = ask({"vllm": "0.30.0"}, kind="reference", faults=FAULTS)
    assert told(question, "vllm") == []


@pytest.mark.parametrize(
    ("text", "version"), [("6.11.0-1013-oem", "6.11.0"), ("0.30.0rc1", "0.30.0rc1"), ("x", "None")]
)
def test_versions_of_distributions_are_understood(text: str, version: str) -> None:
    assert str(parse_version(text)) == version
