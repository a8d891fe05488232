"""The report's lines about the machine, the versions and the model."""

from __future__ import annotations

import platform

import pytest

from hisparsed import __version__
from hisparsed.demo.node import DemoSettings
from hisparsed.demo.origin import cpu_name, cpus_text, origin_of


@pytest.mark.parametrize(
    ("count", "cpu_max", "text"),
    [
        (1, "", "1 CPU"),
        (2, "max 100000", "2 CPUs"),
        (2, "200000 100000", "2 CPUs"),
        (2, "80000 100000", "0.8 of 2 CPUs"),
        (16, "1200000 100000", "12 of 16 CPUs"),
    ],
)
def test_a_quota_below_the_cpus_is_named(count: int, cpu_max: str, text: str) -> None:
    assert cpus_text(count, cpu_max) == text


def test_the_cpu_has_the_name_that_the_kernel_gives() -> None:
    assert cpu_name("processor\t: 0\nmodel name\t: AMD EPYC 9B14\nflags : fpu\n") == "AMD EPYC 9B14"
    assert cpu_name("processor\t: 0\nCPU part\t: 0xd0c\n") == ""


def test_the_origin_names_machine_versions_and_model() -> None:
    origin = origin_of("small", DemoSettings(layers=4, index_topk=32, seed=7))
    assert platform.node() in origin.machine
    assert "GiB of memory" in origin.machine
    assert f"hisparsed {__version__}, vLLM " in origin.software
    assert origin.model.startswith("small: 4 layers, top-32 sparse attention, random weights")
    assert "seed 7" in origin.model
