"""Seconds of steps without prefill: what more running requests would share."""

from __future__ import annotations

from collections.abc import Sequence

from hisparsed.engine.decode_time import DecodeTime


def seconds(*passes: tuple[float, bool, Sequence[int]], query_len: int = 4) -> float:
    """``passes``: when each begins, whether requests ran on till then, and what it schedules."""
    time = DecodeTime(query_len)
    for now_s, running, scheduled in passes:
        time.pass_begins(now_s, running)
        time.pass_ended(scheduled)
    return time.seconds


def test_a_step_that_only_decodes_lasts_until_the_next_pass() -> None:
    assert seconds((1.0, False, [4, 1]), (1.5, True, [4, 4]), (3.0, True, [2])) == 2.0


def test_a_step_with_prefill_in_it_does_not_count() -> None:
    assert seconds((1.0, False, [4, 500]), (2.0, True, [4, 4]), (2.5, True, [])) == 0.5


def test_a_step_of_more_tokens_than_drafts_and_one_is_prefill() -> None:
    assert seconds((1.0, False, [5]), (2.0, True, [])) == 0.0
    assert seconds((1.0, False, [2]), (2.0, True, []), query_len=1) == 0.0


def test_a_pause_does_not_count() -> None:
    assert seconds((1.0, False, [1]), (60.0, False, [1]), (60.5, True, [])) == 0.5


def test_a_pass_that_schedules_nothing_does_not_count() -> None:
    assert seconds((1.0, True, []), (5.0, True, [])) == 0.0
