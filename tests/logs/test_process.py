"""Log lines of the engine process reach the daemon, and never hold the engine up."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Iterator

import pytest

from hisparsed.logs.process import (
    LOG_SOCKET_ENV,
    EngineLogReceiver,
    ForwardHandler,
    process_handler,
)

Line = tuple[float, int, str, str]


class Taken:
    """Lines that came in; ``wait`` for a number of them."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._news = threading.Semaphore(0)

    def add(self, at_unix_s: float, level: int, logger: str, text: str) -> None:
        self.lines.append((at_unix_s, level, logger, text))
        self._news.release()

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self._news.acquire(timeout=20)


@pytest.fixture
def taken() -> Taken:
    return Taken()


@pytest.fixture
def receiver(taken: Taken) -> Iterator[EngineLogReceiver]:
    receiver = EngineLogReceiver(taken.add)
    receiver.start()
    yield receiver
    receiver.close()


def record(text: str, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("vllm.core", level, __file__, 1, text, None, None)


def say_and_end(path: str) -> None:
    os.environ[LOG_SOCKET_ENV] = path
    logger = logging.getLogger("of-a-test")
    logger.addHandler(process_handler())
    logger.error("the last words")
    os._exit(1)


def test_the_last_words_of_a_process_that_dies_arrive_once(
    receiver: EngineLogReceiver, taken: Taken
) -> None:
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=say_and_end, args=(os.environ[LOG_SOCKET_ENV],))
    child.start()
    taken.wait(1)
    child.join(20)
    assert [line[1:] for line in taken.lines] == [(40, "of-a-test", "the last words")]


def test_the_daemon_does_not_send_to_itself(receiver: EngineLogReceiver) -> None:
    process_handler.cache_clear()
    assert process_handler().others == []


def test_without_a_daemon_lines_are_dropped_at_once(receiver: EngineLogReceiver) -> None:
    path = os.environ[LOG_SOCKET_ENV]
    receiver.close()
    handler = ForwardHandler(path)
    handler.emit(record("nobody listens"))
    handler.close()
    assert LOG_SOCKET_ENV not in os.environ


def test_what_is_no_line_is_left_out(receiver: EngineLogReceiver, taken: Taken) -> None:
    handler = ForwardHandler(os.environ[LOG_SOCKET_ENV])
    for rubbish in (b"{", b"[]", b'["x", 1, "a", "b"]'):
        handler._socket.sendto(rubbish, os.environ[LOG_SOCKET_ENV])
    handler.emit(record("x" * 100_000))
    handler.close()
    taken.wait(1)
    assert [len(line[3]) for line in taken.lines] == [4_000]


def test_closing_takes_in_what_was_sent_before(taken: Taken) -> None:
    receiver = EngineLogReceiver(taken.add)
    receiver.start()
    handler = ForwardHandler(os.environ[LOG_SOCKET_ENV])
    for number in range(8):
        handler.emit(record(f"{number}"))
    handler.close()
    receiver.close()
    assert [line[3] for line in taken.lines] == [f"{number}" for number in range(8)]
