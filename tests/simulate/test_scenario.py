"""Options of `hisparsed simulate`: what cannot run is refused; the node as it is varied."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small import call, measured
from typer.testing import CliRunner, Result

from hisparsed.cli.app import app
from hisparsed.config.node_description import NodeDescription, load_node_description
from hisparsed.engine.simulated.cost import RowModel
from hisparsed.engine.simulated.work import StepPart, StepWorker, WorkTotals
from hisparsed.errors import UserError
from hisparsed.simulate.results import Measures
from hisparsed.simulate.scenario import parse_factor, varied

OPENHANDS = ("--trace", "openhands")


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments])


@pytest.fixture
def chat(tmp_path: Path) -> str:
    path = tmp_path / "chat.jsonl"
    lines = [
        {"timestamp": at, "input_length": 700, "output_length": 40, "hash_ids": [at, at + 1]}
        for at in range(0, 5000, 500)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Policies that were run, by a node that fails from the third on."""
    found: list[str] = []

    def run_policy(_scenario: Any, policy: Any, _seed: int, **_options: Any) -> Measures:
        found.append(policy.name)
        if len(found) > 2:
            raise UserError("the node broke")
        return measured(call(20, 21, 22))

    fake = SimpleNamespace(run_policy=run_policy)
    monkeypatch.setitem(sys.modules, "hisparsed.simulate.run", fake)
    return found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--users", "12"], "--users: 12 at --scale 1/8 is not a whole number .* multiple of 8"),
        (
            [*OPENHANDS, "--policy", "stock", "--policy", "standard"],
            "--policy standard: --scale: 1/8 .* holds 44224 tokens .* one call has 86080; "
            "use --scale 1/4 or more, or a smaller --max-model-len",
        ),
        ([*OPENHANDS, "--scale", "1/99"], "--policy stock: --scale: 1/99 .* cannot admit"),
        (["--max-model-len", "2000000"], "--max-model-len: calls of 2000000 tokens"),
        ([*OPENHANDS, "--load", "2"], "--load: 2 .* openhands does not; use --users"),
        (["--load", "1e9"], "--load: 1e.09 is not right; need a number of 0.001 to 100"),
        (["--users", "100000000"], "--users: 100000000 is not right; need 1 to 65536"),
        (["--users", "8", "--users", "8"], "--users: 8 is there twice"),
        (["--policy", "policy", "--policy", "policy"], "--policy: policy is there twice"),
        (
            ["--policy", "stock", "--policy", "stock,copies=1", "--sweep", "copies=1|2"],
            "--sweep: stock,copies=1 is there twice",
        ),
        (["--for", "1h", "--warmup", "1h"], "--warmup: 1h leaves nothing to measure of --for 1h"),
        (["--host-budget", "1KiB"], "--host-budget: 1KiB .* under stock; give at least 34GiB"),
        (["--policy", "policy,host.budget=1KiB"], "host.budget: 1KiB .* give at least 26GiB"),
        (
            [*OPENHANDS, "--scale", "1", "--policy", "standard,host.budget=1KiB"],
            "host.budget: 1KiB .* cannot hold one chunk; give at least 4MiB",
        ),
    ],
)
def test_what_cannot_run_or_is_ignored_is_refused(
    runs: list[str], arguments: list[str], message: str
) -> None:
    found = command(*arguments)
    with pytest.raises(UserError, match=message):
        raise found.exception or AssertionError(found.output)
    assert not runs


def test_users_of_recorded_chat_alone_are_refused(runs: list[str], chat: str) -> None:
    found = command("--trace", chat, "--users", "8", "--users", "32")
    assert "--users: 8 is for traces that users play" in str(found.exception)
    assert not runs


def test_half_of_recorded_chat_is_no_whole_node(runs: list[str], chat: str) -> None:
    found = command("--trace", chat, "--half", "1", "--scale", "1")
    assert "is not enough traffic for --scale 1; use at most 1/2" in str(found.exception)
    assert not runs


def test_agents_beside_chat_have_users_and_load(runs: list[str], chat: str) -> None:
    mixed = ("--trace", chat, *OPENHANDS, "--users", "16", "--load", "0.5", "--load", "2")
    found = command(*mixed, "--policy", "policy", "--json")
    assert found.exit_code == 0, found.output
    first, second = json.loads(found.stdout)["policies"]
    assert [(one["users"], one["trace_load"]) for one in (first, second)] == [(16, 0.5), (16, 2)]
    assert "policy, 16 users, load 0.5, seed 0" in found.stderr


@pytest.mark.parametrize("as_json", [False, True])
def test_what_finished_before_a_run_failed_is_printed(runs: list[str], as_json: bool) -> None:
    policies = [part for name in ("stock", "policy", "agentic") for part in ("--policy", name)]
    found = command(*policies, *(["--json"] if as_json else []))
    assert str(found.exception) == "the node broke"
    if as_json:
        assert [one["name"] for one in json.loads(found.stdout)["policies"]] == ["stock", "policy"]
    else:
        assert [line.split()[0] for line in found.stdout.splitlines()[-2:]] == ["stock", "policy"]


def test_nothing_is_printed_when_nothing_finished(runs: list[str]) -> None:
    runs += ["before", "before"]
    assert command("--policy", "stock").stdout == ""
    assert runs[2:] == ["stock"]


@pytest.fixture(scope="module")
def h200() -> NodeDescription:
    return load_node_description("8xh200-glm-5.3")


def test_misses_and_unions_grow_by_their_factors_within_what_is_possible(
    h200: NodeDescription,
) -> None:
    rows = varied(h200, misses=1.5, union=1.5, spread=None).rows
    assert [share for _, share in rows.miss_curve] == pytest.approx([0.45, 0.201, 0.1005, 0.06])
    assert rows.union == pytest.approx((1.0, 2.0, 2.475, 2.865))
    assert (
        max(share for _, share in varied(h200, misses=9, union=1, spread=None).rows.miss_curve) == 1
    )


def test_factors_of_one_change_nothing(h200: NodeDescription) -> None:
    assert varied(h200, misses=1, union=1, spread=None) == h200
    assert varied(h200, misses=1, union=1, spread=0.5).rows.spread == 0.5


@pytest.mark.parametrize("text", ["much", "0", "-1", "11", "xx2"])
def test_a_wrong_factor_is_told(text: str) -> None:
    with pytest.raises(UserError, match="--misses"):
        parse_factor("--misses", text)


def test_a_factor_may_be_written_with_a_times_sign() -> None:
    assert parse_factor("--misses", "x1.5") == parse_factor("--misses", "1.5") == 1.5


class NothingResident:
    def resident_share(self, request_id: str) -> float:
        return 0.0

    def hot_rows(self, request_id: str) -> int:
        return 4096


def test_requests_differ_by_their_locality(h200: NodeDescription) -> None:
    factors = {"near": 2.0, "far": 0.5, "mean": 1.0}
    model = RowModel(2048, h200.rows.miss_curve, h200.rows.union)
    worker = StepWorker(model, NothingResident(), 64, 2048, 8192, factors.__getitem__)
    segments = [StepPart(name, 50_000, 1, 0, 50_001) for name in factors]
    worker.of(segments, WorkTotals())
    curves = {name: dict(curve) for name, curve in worker.request_curves(1).items()}
    assert curves["near"][4096] == pytest.approx(2048 * 0.067)
    assert curves["mean"][4096] == pytest.approx(2048 * 0.134)
    assert curves["far"][4096] == pytest.approx(2048 * 0.30)
    node = dict(worker.miss_curve())
    assert node[4096] == pytest.approx((0.067 + 0.134 + 0.30) / 3)
