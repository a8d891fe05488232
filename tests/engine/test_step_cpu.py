"""CPU time a step: what counts, which step it belongs to, and how long it is remembered."""

from __future__ import annotations

from hisparsed.engine.step_cpu import MOST_STEPS, WINDOW_S, StepCpuTimes
from hisparsed.policy.signals import StepCpu


class Cpu:
    def __init__(self) -> None:
        self.spent_s = 0.0
        self.times = StepCpuTimes(lambda: self.spent_s)

    def schedule(self, seconds: float) -> None:
        with self.times.scheduling():
            self.spent_s += seconds

    def take(self, seconds: float, now_s: float) -> None:
        self.spent_s += 1.0  # the model, on the same thread
        with self.times.taking_output(now_s):
            self.spent_s += seconds


def test_a_step_is_its_scheduling_and_its_output_without_the_model() -> None:
    cpu = Cpu()
    assert cpu.times.figures(0.0) is None
    cpu.schedule(0.25)
    cpu.take(0.5, 1.0)
    assert cpu.times.figures(1.0) == StepCpu(0.75, 0.75)


def test_how_busy_the_thread_was_since_the_first_step_that_is_kept() -> None:
    cpu = Cpu()
    for at_s in (10.0, 12.0, 14.0):
        cpu.schedule(0.25)
        cpu.take(0.75, at_s)
    found = cpu.times.figures(14.0)
    assert found is not None
    assert found.busy_ratio == 0.5
    # Time without a step counts as idle.
    later = cpu.times.figures(18.0)
    assert later is not None
    assert later.busy_ratio == 0.25


def test_scheduling_that_is_ahead_belongs_to_its_own_step() -> None:
    cpu = Cpu()
    cpu.schedule(0.25)
    cpu.schedule(8.0)
    cpu.take(0.5, 1.0)
    assert cpu.times.figures(1.0) == StepCpu(0.75, 0.75)
    cpu.take(0.5, 1.0)
    assert cpu.times.figures(1.0) == StepCpu(8.5, 8.5)


def test_the_median_and_the_tail() -> None:
    cpu = Cpu()
    for step in range(200):
        cpu.schedule(0.0)
        cpu.take(4.0 if step >= 197 else 0.5, 1.0)
    assert cpu.times.figures(1.0) == StepCpu(0.5, 4.0)


def test_only_the_last_minute_counts_and_memory_is_bounded() -> None:
    cpu = Cpu()
    for step in range(2 * MOST_STEPS):
        cpu.schedule(0.5 if step < MOST_STEPS else 0.25)
        cpu.take(0.0, 1.0)
    assert cpu.times.figures(1.0) == StepCpu(0.25, 0.25)
    assert cpu.times.figures(1.0 + WINDOW_S) is not None
    assert cpu.times.figures(1.1 + WINDOW_S) is None
