"""Which requests the engine takes for the daemon's own, where they queue, and what is kept."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.request_queue import FCFSRequestQueue

from hisparsed.engine.canary_calls import CanaryCalls
from hisparsed.engine.messages import CanaryCall

pytestmark = pytest.mark.engine

NAME = "canary-0123456789abcdef"


def calls(*, clock: deque[float] | None = None) -> CanaryCalls:
    """Nothing of the engine is needed as long as no page is dropped."""
    ticks = clock if clock is not None else deque([0.0] * 99)
    resident: Any = SimpleNamespace(residency=lambda request_id: "full")
    return CanaryCalls(None, [resident], None, 1, clock_s=ticks.popleft)


def request(name: str, outputs: int = 0) -> Any:
    return SimpleNamespace(request_id=name, num_output_tokens=outputs, block_hashes=[])


def begin(made: CanaryCalls, name: str = NAME) -> None:
    made.begin(CanaryCall(request_id=name, residency="full"))


def test_only_an_announced_request_is_the_daemons_own() -> None:
    made = calls()
    assert not made.added(request(f"{NAME}-1a2b"))
    begin(made)
    assert made.added(request(f"{NAME}-1a2b"))
    assert not made.added(request("canary-of-a-client"))
    made.end(NAME)
    assert not made.owns(f"{NAME}-1a2b")


def test_a_name_that_could_be_guessed_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        CanaryCall(request_id="canary-1", residency="none")


def test_it_waits_behind_everybody_else() -> None:
    made = calls()
    begin(made)
    waiting = FCFSRequestQueue()
    for name in (NAME, "first", "second"):
        waiting.add_request(request(name))
    made.before_schedule([], waiting)
    assert [one.request_id for one in waiting] == ["first", "second", NAME]


def test_a_clients_call_keeps_its_place() -> None:
    made = calls()
    begin(made)
    waiting = FCFSRequestQueue()
    for name in ("first", NAME, "second"):
        waiting.add_request(request(name))
    made.before_schedule([], waiting)
    assert [one.request_id for one in waiting] == ["first", NAME, "second"]


def test_cost_is_its_share_of_the_step_by_tokens() -> None:
    made = calls(clock=deque([10.0, 10.8, 20.0, 20.4]))
    begin(made)
    made.after_schedule([request(NAME)], {NAME: 25, "other": 75})
    made.output_taken()
    made.after_schedule([request(NAME, outputs=1)], {NAME: 1, "other": 1})
    made.output_taken()
    seen = made.end(NAME)
    assert seen.scheduled_tokens == 26
    assert seen.step_s == pytest.approx(0.25 * 0.8 + 0.5 * 0.4)
    assert (seen.full, seen.mixed, seen.none) == (1, 0, 0), "prefill is no decode step"


def test_what_never_came_is_forgotten_for_new_ones() -> None:
    made = calls()
    for number in range(5):
        begin(made, f"{NAME}-{number}")
    with pytest.raises(ValueError, match="was announced, or it was forgotten"):
        made.end(f"{NAME}-0")
    assert made.end(f"{NAME}-4").scheduled_tokens == 0
