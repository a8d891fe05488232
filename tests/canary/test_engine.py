"""The canary on the reference engine: equal answers, one harmed row found, calls set apart."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from conversations import TOPK, EngineShape, apply, build_engine, core_of, report
from in_process import Found, InProcess, Saboteur
from vllm.v1.core.sched.request_queue import FCFSRequestQueue

from hisparsed.canary.round import CanaryQuestion
from hisparsed.control.status.document import CanaryState
from hisparsed.engine.canary_calls import CanaryCalls
from hisparsed.engine.messages import CanaryCall, report_from_wire
from hisparsed.policy.signals import EngineReport, Lever

pytestmark = pytest.mark.engine

EVERY_S = 600.0
PROMPT = 2 * TOPK
"""Two times the top-k, as the policy has it where nothing is said."""


class Node:
    """A reference engine with lent blocks, its canary, and a way to damage its rows."""

    def __init__(self, engine: Any, salt: str, make_side: Callable[[Any], Any]) -> None:
        self.engine = engine
        self.port = InProcess(engine, salt)
        self.side = make_side(self.port)
        self.saboteur = Saboteur(engine)
        self.found: Found | None = None

    def report(self) -> EngineReport:
        return report_from_wire(report(self.engine))

    async def round(self, **canary: Any) -> None:
        """A tick in which a round is due."""
        await self.side.tick(self.report(), **canary)
        self.side.now_s += EVERY_S

    async def record(self) -> Found:
        """The first round, looking on where the rows are that it reads."""

        def look(question: CanaryQuestion, request: Any) -> None:
            if question.residency == "none" and self.found is None:
                self.found = self.saboteur.look(request)

        self.port.between = look
        await self.round()
        self.port.between = lambda question, request: None
        assert self.found is not None
        return self.found

    @property
    def status(self) -> Any:
        return self.side.canary.status()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Shared: each test's canary has its own pages."""
    built = build_engine(tmp_path_factory.mktemp("engine"), EngineShape())
    apply(built, {"offload_target_blocks": 300})
    return built


@pytest.fixture
def node(engine: Any, request: pytest.FixtureRequest, make_side: Callable[[Any], Any]) -> Node:
    return Node(engine, request.node.name, make_side)


async def test_answers_are_equal_in_full_mixed_and_no_residency(node: Node) -> None:
    await node.record()
    assert node.side.events() == ["canary-recorded"]
    await node.round()
    assert node.status.state is CanaryState.OK
    none, mixed, full = node.status.last_round
    assert (none.asked, mixed.asked, full.asked) == ("none", "mixed", "full")
    assert none.steps_none >= 20
    assert none.steps_full + none.steps_mixed <= 3
    assert mixed.steps_mixed >= 20
    assert full.steps_full == 23
    assert none.prefix_hit_tokens == mixed.prefix_hit_tokens == PROMPT - 16
    assert full.recomputed
    assert full.prefix_hit_tokens == 0
    assert node.side.events() == ["canary-recorded"]
    assert node.side.holds.frozen == frozenset()


async def test_it_is_no_session_no_finished_call_and_leaves_the_ledger_sound(node: Node) -> None:
    await node.round()
    await node.round()
    seen = node.report()
    assert (
        seen.sessions.live_sessions,
        seen.sessions.live_set_tokens,
        seen.requests.finished_total,
    ) == (0, 0, 0)
    assert [one for one in seen.hisparse.ghost if one.tokens_total] == []
    assert core_of(node.engine).scheduler.hisparsed.host.watch.look_at_everything() == []


async def test_a_round_costs_its_prompt_once_and_three_answers(node: Node) -> None:
    await node.round()
    before = node.status
    await node.round()
    spent = node.status.scheduled_tokens_total - before.scheduled_tokens_total
    assert spent == (PROMPT + 23) + 2 * (16 + 23)
    assert node.status.step_seconds_total > 0
    assert node.status.share_of_time == pytest.approx(
        node.status.step_seconds_total / (2 * EVERY_S)
    )


async def assert_found_in_the_next_round(node: Node, asked: str) -> None:
    await node.round()
    runs = {one.asked: one for one in node.status.last_round}
    assert not runs[asked].equal
    assert runs["full"].equal, "what is computed again is right again"
    assert node.status.state is CanaryState.MISMATCH
    assert node.status.rounds_total == 2
    assert node.side.events() == ["canary-recorded", "canary-mismatch"]
    assert node.side.holds.frozen == frozenset(Lever)


async def test_a_harmed_row_of_the_host_pool_is_found_within_one_period(node: Node) -> None:
    found = await node.record()
    node.saboteur.harm_host_row(found)
    await assert_found_in_the_next_round(node, "none")


async def test_a_harmed_row_of_a_hot_buffer_is_found_within_one_period(node: Node) -> None:
    await node.record()
    harmed = False

    def harm(question: CanaryQuestion, request: Any) -> None:
        nonlocal harmed
        if question.residency == "none" and not harmed and request.num_output_tokens > 4:
            harmed = node.saboteur.harm_hot_row(request)

    node.port.between = harm
    await assert_found_in_the_next_round(node, "none")
    assert harmed


async def test_a_harmed_row_of_a_lent_chunk_is_found_within_one_period(node: Node) -> None:
    found = await node.record()
    node.saboteur.harm_chunk_row(found)
    await assert_found_in_the_next_round(node, "none")


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
