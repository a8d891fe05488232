"""Reads metrics from the status document: labels and numbers, nothing where unknown.

``table`` has the names and helps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from hisparsed.control.status.document import (
    CanaryState,
    CanaryStatus,
    EngineState,
    EngineStatus,
    Lifecycle,
    Status,
)
from hisparsed.engine.kernel_choice import KernelsStatus
from hisparsed.policy.derived import Derived, PoolFigures
from hisparsed.policy.schema import Mode
from hisparsed.policy.signals import AdmissionOrder, Snapshot

Sample = tuple[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class Metric:
    """``read`` yields label values and a number; nothing where it is not known yet."""

    name: str
    help: str
    read: Callable[[Status], Iterable[Sample]]
    labels: tuple[str, ...] = ()
    is_counter: bool = False


def seen(read: Callable[[Snapshot], float | None]) -> Callable[[Status], Iterator[Sample]]:
    def samples(status: Status) -> Iterator[Sample]:
        value = read(status.observed) if status.observed is not None else None
        if value is not None:
            yield (), value

    return samples


def derived(read: Callable[[Derived], float | None]) -> Callable[[Status], Iterator[Sample]]:
    def samples(status: Status) -> Iterator[Sample]:
        value = read(status.derived) if status.derived is not None else None
        if value is not None:
            yield (), value

    return samples


def step_cpu(status: Status) -> Iterator[Sample]:
    if status.observed is not None and status.observed.step_cpu is not None:
        yield ("0.5",), status.observed.step_cpu.p50_s
        yield ("0.99",), status.observed.step_cpu.p99_s


def core_busy(status: Status) -> Iterator[Sample]:
    if status.observed is not None and status.observed.step_cpu is not None:
        busy = status.observed.step_cpu.busy_ratio
        if busy is not None:
            yield (), busy


def of_pools(read: Callable[[PoolFigures], float]) -> Callable[[Status], Iterator[Sample]]:
    def samples(status: Status) -> Iterator[Sample]:
        if status.derived is not None:
            yield ("hisparse",), read(status.derived.pools.hisparse)
            yield ("offload",), read(status.derived.pools.offload)

    return samples


def ghost_tokens(status: Status) -> Iterator[Sample]:
    if status.derived is not None:
        pools = status.derived.pools
        for name, pool in (("hisparse", pools.hisparse), ("offload", pools.offload)):
            if pool.ghost_tokens_total is not None:
                yield (name,), pool.ghost_tokens_total


def idle_bytes(pool: PoolFigures) -> float:
    return max(0, pool.capacity_bytes - pool.in_use_bytes)


def residency(status: Status) -> Iterator[Sample]:
    if status.observed is not None:
        requests = status.observed.requests
        yield ("full",), requests.full
        yield ("mixed",), requests.mixed
        yield ("none",), requests.none


def rows(status: Status) -> Iterator[Sample]:
    if status.observed is not None and status.observed.hot.counted:
        hot = status.observed.hot
        yield ("resident",), hot.resident_total
        yield ("hit",), hot.hits_total
        yield ("load",), hot.loads_total


def order(status: Status) -> Iterator[Sample]:
    if status.observed is not None:
        for one in AdmissionOrder:
            yield (one.value,), status.observed.admission.order is one


def modes(status: Status) -> Iterator[Sample]:
    for lever in status.levers:
        for mode in Mode:
            yield (lever.lever.value, mode.value), lever.mode is mode


def lifecycle(status: Status) -> Iterator[Sample]:
    for one in Lifecycle:
        yield (one.value,), status.lifecycle is one


def of_canary(
    read: Callable[[CanaryStatus], float | None],
) -> Callable[[Status], Iterator[Sample]]:
    def samples(status: Status) -> Iterator[Sample]:
        value = read(status.canary) if status.canary is not None else None
        if value is not None:
            yield (), value

    return samples


def of_engine(
    read: Callable[[EngineStatus], float | None],
) -> Callable[[Status], Iterator[Sample]]:
    def samples(status: Status) -> Iterator[Sample]:
        value = read(status.engine) if status.engine is not None else None
        if value is not None:
            yield (), value

    return samples


def of_kernels(
    read: Callable[[KernelsStatus], float | None],
) -> Callable[[Status], Iterator[Sample]]:
    def samples(status: Status) -> Iterator[Sample]:
        value = read(status.kernels) if status.kernels is not None else None
        if value is not None:
            yield (), value

    return samples


def kernels_used(status: Status) -> Iterator[Sample]:
    if status.kernels is not None:
        yield (status.kernels.used, status.kernels.reason.value), 1


def engine_state(status: Status) -> Iterator[Sample]:
    if status.engine is not None:
        for one in EngineState:
            yield (one.value,), status.engine.state is one


def canary_state(status: Status) -> Iterator[Sample]:
    if status.canary is not None:
        for one in CanaryState:
            yield (one.value,), status.canary.state is one
