"""`hisparsed simulate` refuses what cannot run or would be ignored before anything starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from measured import call, measured
from typer.testing import CliRunner, Result

from hisparsed.cli.app import app
from hisparsed.errors import UserError
from hisparsed.simulate.measures import Measures

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
        (["--users", "12"], "--users: 12 at --scale 1/8 is no whole number .* multiple of 8"),
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
