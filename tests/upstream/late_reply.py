"""A worker's late reply is taken for the answer to the next call.

``MultiprocExecutor.collective_rpc`` reads replies in order and they carry no number. A call that
times out leaves its reply to come; the next call reads it as its own, and each call after that is
one reply behind.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any

from tests.upstream.outcome import run


class SlowWorker:
    """One worker's two queues: its first reply comes after its caller has given up."""

    def __init__(self) -> None:
        self._calls: deque[Any] = deque()
        self._late = True

    def enqueue(self, call: Any) -> None:
        self._calls.append(call)

    def dequeue(self, timeout: float | None = None) -> Any:
        from vllm.v1.executor.multiproc_executor import WorkerProc

        if self._late:
            self._late = False
            raise TimeoutError
        method = self._calls.popleft()[0]
        return WorkerProc.ResponseStatus.SUCCESS, f"reply to {method}"


def reproduce() -> str | None:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    worker = SlowWorker()
    executor: Any = MultiprocExecutor.__new__(MultiprocExecutor)
    executor.is_failed = False
    executor.rpc_broadcast_mq = worker
    executor.response_mqs = [worker]
    executor.futures_queue = deque()
    with suppress(TimeoutError):
        executor.collective_rpc("first", timeout=0.01)
    answer = executor.collective_rpc("second", timeout=1.0)
    if answer == ["reply to second"]:
        return None
    return f"collective_rpc('first') timed out; collective_rpc('second') then returned {answer}."


if __name__ == "__main__":
    run(reproduce)
