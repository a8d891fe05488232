"""What the API side does with new sessions and long calls while the node is full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small import agents, small_node

from hisparsed.policy.signals import AdmissionOrder, AdmissionRules
from hisparsed.simulate.control import Arrival, SimulatedAdmission
from hisparsed.simulate.policies import choose_policy
from hisparsed.simulate.results import finished_calls
from hisparsed.simulate.run import run_policy
from hisparsed.simulate.scenario import Scenario, Traffic
from hisparsed.simulate.workload import TraceSessions


def limits(**changes: Any) -> AdmissionRules:
    values: dict[str, Any] = {
        "order": AdmissionOrder.ARRIVAL,
        "ageing_s": 30.0,
        "max_running": 8,
        "max_waiting_sessions": 2,
        "retry_after_s": 10.0,
        "max_wait_s": 60.0,
        "when_full": "wait",
        **changes,
    }
    return AdmissionRules(**values)


def arrive(
    calls: SimulatedAdmission[str], item: str, admission: AdmissionRules | None, **changes: Any
) -> Arrival:
    values: dict[str, Any] = {"tokens": 100, "new_session": True, "waiting": 2, "now_s": 0.0}
    return calls.arrive(item, admission=admission, **{**values, **changes})


def test_without_limits_all_pass() -> None:
    assert arrive(SimulatedAdmission(), "a", None) is Arrival.SEND
    assert arrive(SimulatedAdmission(), "a", limits(max_waiting_sessions=None)) is Arrival.SEND


def test_a_session_under_way_is_never_held() -> None:
    assert arrive(SimulatedAdmission(), "a", limits(), new_session=False) is Arrival.SEND


def test_a_new_session_beyond_the_limit_waits_its_turn_or_is_refused() -> None:
    assert arrive(SimulatedAdmission(), "a", limits(), waiting=1) is Arrival.SEND
    assert arrive(SimulatedAdmission(), "a", limits(when_full="refuse")) is Arrival.REFUSED
    calls: SimulatedAdmission[str] = SimulatedAdmission()
    assert arrive(calls, "a", limits()) is Arrival.HELD
    assert calls.due(limits(), waiting=2, now_s=5.0).send == []
    assert calls.due(limits(), waiting=1, now_s=6.0).send == ["a"]
    assert calls.due(limits(), waiting=0, now_s=7.0).send == []


def test_where_nothing_waits_everybody_starts() -> None:
    """As at the door of the daemon: a limit of 0 is no lock."""
    none = limits(max_waiting_sessions=0)
    calls: SimulatedAdmission[str] = SimulatedAdmission()
    assert arrive(calls, "a", none, waiting=0) is Arrival.SEND
    assert arrive(calls, "b", none, waiting=1) is Arrival.HELD
    assert arrive(calls, "c", none, waiting=1) is Arrival.HELD
    assert calls.due(none, waiting=0, now_s=1.0).send == ["b"]


def test_nobody_overtakes_those_who_are_held() -> None:
    calls: SimulatedAdmission[str] = SimulatedAdmission()
    for item in ("a", "b"):
        arrive(calls, item, limits())
    assert arrive(calls, "c", limits(), waiting=0) is Arrival.HELD
    assert calls.due(limits(), waiting=0, now_s=1.0).send == ["a", "b"]
    assert calls.due(limits(), waiting=1, now_s=1.0).send == ["c"]


def test_who_is_held_too_long_is_refused() -> None:
    calls: SimulatedAdmission[str] = SimulatedAdmission()
    arrive(calls, "a", limits())
    assert calls.due(limits(), waiting=2, now_s=59.9).refused == []
    assert calls.due(limits(), waiting=2, now_s=60.0).refused == ["a"]


def test_a_limit_that_is_lifted_lets_all_in() -> None:
    calls: SimulatedAdmission[str] = SimulatedAdmission()
    arrive(calls, "a", limits())
    assert calls.due(limits(max_waiting_sessions=None), waiting=9, now_s=1.0).send == ["a"]


def test_a_call_beyond_the_context_limit_is_refused_for_good() -> None:
    admission = limits(max_context_tokens=99)
    assert arrive(SimulatedAdmission(), "a", admission, new_session=False) is Arrival.TOO_LONG
    assert (
        arrive(SimulatedAdmission(), "a", admission, tokens=99, new_session=False) is Arrival.SEND
    )


def test_long_calls_take_turns_where_they_may_wait() -> None:
    admission = limits(max_context_tokens=99, over_max_context="wait")
    calls: SimulatedAdmission[str] = SimulatedAdmission()
    assert arrive(calls, "a", admission) is Arrival.SEND
    assert arrive(calls, "b", admission) is Arrival.HELD
    assert calls.due(admission, waiting=0, now_s=1.0).send == []
    calls.finished("a")
    assert calls.due(admission, waiting=0, now_s=2.0).send == ["b"]


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize("when_full", ["wait", "refuse"])
def test_sessions_held_back_are_served_in_the_end(tmp_path: Path, when_full: str) -> None:
    node = small_node(engine={"max_num_seqs": 2})
    traffic = (Traffic(TraceSessions(agents(9, 2), 64), 9),)
    scenario = Scenario(node, traffic, node.host.budget, duration_s=60.0, warmup_s=10.0)
    spec = (
        "policy,admission.order=held-prefix-first,admission.max_waiting_sessions=1,"
        f"admission.when_full={when_full},admission.retry_after=1s"
    )
    measures = run_policy(scenario, choose_policy(spec), 0, work_folder=tmp_path)
    assert (measures.refused > 0) == (when_full == "refuse")
    assert len({call.play for call in finished_calls(measures)}) > 9
    # A client's wait begins when it first tries, and each call is there once.
    first = [call for call in measures.calls if call.index == 0]
    assert max(call.ttft_s for call in first if call.first_token_s is not None) > 3
    assert len({(call.play, call.index) for call in measures.calls}) == len(measures.calls)


@pytest.mark.engine
def test_a_call_over_the_context_limit_ends_its_session(tmp_path: Path) -> None:
    node = small_node()
    traffic = (Traffic(TraceSessions(agents(4, 6), 64), 4),)
    scenario = Scenario(node, traffic, node.host.budget, duration_s=60.0, warmup_s=10.0)
    chosen = choose_policy("policy,admission.max_context=2200")
    measures = run_policy(scenario, chosen, 0, work_folder=tmp_path)
    assert measures.refused > 0
    assert max(call.input_tokens for call in measures.calls) <= 2100
