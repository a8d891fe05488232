"""Sizes that do not fit a scaled node are refused with the least that fits, and with that much it
starts."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from small import MIB, agents, small_node

from hisparsed.engine.simulated.node import SimulatedNode
from hisparsed.engine.simulated.vllm_config import SimulatedOptions
from hisparsed.errors import UserError
from hisparsed.policy.units import parse_bytes
from hisparsed.simulate.policies import PolicyChoice, choose_policy, policy_text_of_part
from hisparsed.simulate.results import finished_calls
from hisparsed.simulate.run import run_policy
from hisparsed.simulate.scenario import Scenario, Traffic
from hisparsed.simulate.sizes import expected_geometry, fitting_sizes
from hisparsed.simulate.workload import TraceSessions


def scenario(gpu_mib: int = 48) -> Scenario:
    node = small_node(gpu={"kv_memory": gpu_mib * MIB})
    traffic = (Traffic(TraceSessions(agents(6, 3), 64), 4),)
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
@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(one, marks=pytest.mark.long)
            for one in ("stock", "stock,pools.hisparse=90%", "standard")
        ),
        "policy",
    ],
)
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


def test_a_policy_that_the_node_refuses_is_named_before_anything_starts() -> None:
    policy = choose_policy("policy,hot.min=40,hot.start=40,hot.max=40")
    assert re.match(
        r"--policy policy,hot\.min=40\S+: the policy:\d+: hot\.min", message(scenario(), policy)
    )
    assert "copies: 10 of a chunk" in message(scenario(), choose_policy("policy,copies=10"))


@pytest.mark.engine
@pytest.mark.parametrize("copies", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_geometry_that_policies_are_checked_on_is_the_engines(
    tmp_path: Path, copies: int
) -> None:
    one = scenario()
    sizes = fitting_sizes(one, choose_policy(f"policy,copies={copies}"))
    options = SimulatedOptions(
        node=one.node,
        model_folder=tmp_path,
        host_budget_bytes=sizes.host_budget,
        max_lease_rows=sizes.lease_rows,
        max_model_len=sizes.max_model_len,
        scale=one.scale,
        copies=copies,
    )
    node = SimulatedNode(options)
    reported = node.take_report().geometry
    node.shutdown()
    assert reported == expected_geometry(
        one,
        host_budget=sizes.host_budget,
        lease_rows=sizes.lease_rows,
        max_model_len=sizes.max_model_len,
        copies=copies,
    )


def part(spec: str) -> dict[str, Any]:
    text = policy_text_of_part(choose_policy(spec), Fraction(1, 8))
    assert text is not None
    tree: dict[str, Any] = yaml.safe_load(text)
    return tree


def test_a_part_gets_its_part_of_the_sizes_and_counts_in_a_policy(tmp_path: Path) -> None:
    tree = part(
        "policy,pools.offload.floor=20GiB,pools.reserve=10%,admission.max_running=64,"
        "admission.max_waiting_sessions=4,watermark.value=6000"
    )
    assert parse_bytes(tree["pools"]["offload"]["floor"]) == 20 * 2**30 // 8
    assert tree["pools"]["reserve"] == "10%"
    assert tree["pools"]["offload"]["ceiling"] == "50%"
    assert tree["watermark"]["value"] == 750
    # Rounded up: a limit of none would be another policy.
    assert (tree["admission"]["max_running"], tree["admission"]["max_waiting_sessions"]) == (8, 1)
    path = tmp_path / "busy.yaml"
    path.write_text(
        "version: 1\nschedules:\n  - name: busy\n    when: {pressure: high}\n"
        "    set: {pools.reserve: 16GiB, hot.max: 6}\n"
    )
    assert part(str(path))["schedules"][0]["set"] == {"pools.reserve": f"{2 << 30}B", "hot.max": 6}


def test_a_policy_of_shares_is_the_same_on_a_part_and_any_on_the_whole() -> None:
    plain, sized = choose_policy("policy"), choose_policy("policy,pools.offload.floor=20GiB")
    assert policy_text_of_part(plain, Fraction(1, 8)) is plain.text
    assert policy_text_of_part(sized, Fraction(1)) is sized.text
