"""The ring of log lines: bounded, and a traceback stays with its line."""

from __future__ import annotations

import logging

from hisparsed.logs.ring import RING_LINES, LogRing, RingHandler


def test_the_ring_of_log_lines_is_bounded() -> None:
    ring = LogRing()
    for number in range(RING_LINES + 500):
        ring.add("engine", 0.0, 20, "vllm", f"{number}" + "x" * 10_000)
    lines = ring.lines(limit=RING_LINES + 500)
    assert len(lines) == RING_LINES
    assert lines[0].sequence == 501
    assert len(lines[0].text) == 4_000
    assert len(ring.take_new()) == 200
    assert ring.take_new() == []


def test_a_record_keeps_its_traceback() -> None:
    ring, logger = LogRing(), logging.getLogger("hisparsed.of-a-test")
    handler = RingHandler(ring)
    logger.addHandler(handler)
    try:
        raise ZeroDivisionError("a mistake")
    except ZeroDivisionError:
        logger.exception("Tick %d failed.", 7)
    finally:
        logger.removeHandler(handler)
    (line,) = ring.lines(limit=5)
    assert line.text.startswith("Tick 7 failed.\nTraceback")
    assert (line.source, line.level) == ("daemon", logging.ERROR)
