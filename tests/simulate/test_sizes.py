"""What does not fit a scaled node is told with the least that does, and that much starts."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from small import MIB, agents, small_node

from hisparsed.errors import UserError
from hisparsed.simulate.policies import PolicyChoice, choose_policy
from hisparsed.simulate.run import run_policy
from hisparsed.simulate.scenario import Scenario, Traffic
from hisparsed.simulate.sizes import fitting_sizes
from hisparsed.simulate.summary import finished_calls
from hisparsed.simulate.workload import Sessions


def scenario(gpu_mib: int = 48) -> Scenario:
    node = small_node(gpu={"kv_memory": gpu_mib * MIB})
    traffic = (Traffic(Sessions(agents(6, 3), 64), 4),)
    return Scenario(node, traffic, 96 * MIB, Fraction(1, 2), duration_s=60.0, warmup_s=10.0)


def message(one: Scenario, policy: PolicyChoice) -> str:
    with pytest.raises(UserError) as caught:
        fitting_sizes(one, policy)
    return str(caught.value)


def test_without_hisparse_a_call_needs_all_its_kv_on_the_gpu() -> None:
    one, policy = replace(scenario(48), scale=Fraction(1, 8)), choose_policy("standard")
    needs = re.search(r"use --scale (\S+) or more", message(one, policy))
    assert needs is not None
    assert fitting_sizes(replace(one, scale=Fraction(needs[1])), policy).lease_rows == 0
    assert "use a smaller --max-model-len" in message(replace(scenario(1)), policy)


def test_a_warm_up_that_takes_all_of_the_time_is_no_scenario() -> None:
    with pytest.raises(UserError, match="--warmup: 1m leaves nothing to measure of --for 1m"):
        replace(scenario(), warmup_s=60.0)


@pytest.mark.engine
@pytest.mark.parametrize("name", ["stock", "stock,pools.hisparse=90%", "policy", "standard"])
def test_the_least_host_memory_that_is_named_starts_and_serves(tmp_path: Path, name: str) -> None:
    policy = choose_policy(name)
    least = re.search(
        r"give at least (\d+)MiB", message(replace(scenario(), host_budget=1), policy)
    )
    assert least is not None
    one = replace(scenario(), host_budget=int(least[1]) * MIB)
    below = replace(one, host_budget=one.host_budget // 2)
    assert "--host-budget: " in message(below, policy)
    measures = run_policy(one, policy, 0, work_folder=tmp_path)
    assert finished_calls(measures)


@pytest.mark.engine
def test_a_policy_that_the_node_refuses_is_named_as_it_was_written(tmp_path: Path) -> None:
    policy = choose_policy("policy,hot.min=40,hot.start=40,hot.max=40")
    with pytest.raises(
        UserError, match=r"--policy policy,hot\.min=40\S+: the policy:\d+: hot\.min"
    ):
        run_policy(scenario(), policy, 0, work_folder=tmp_path)
