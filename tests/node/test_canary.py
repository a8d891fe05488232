"""The canary of a real node: asked through the command line, answered by the engine's process."""

from __future__ import annotations

import json

import pytest
from serve_process import ServeProcess, hisparsed, until
from streaming import complete

from hisparsed.control.status import CanaryStatus, Observed

pytestmark = pytest.mark.engine


PROMPT = 2 * 64
"""Two times the top-k of the reference node."""


def ask(node: ServeProcess) -> CanaryStatus:
    result = hisparsed("canary", "--now", "--json", "--socket", str(node.files.socket))
    assert result.returncode == 0, result.stderr + result.stdout
    return CanaryStatus.model_validate(json.loads(result.stdout))


def observed(node: ServeProcess) -> Observed:
    found = node.status().observed
    assert found is not None
    return found


def test_a_node_answers_its_canary_alike_in_every_residency(node: ServeProcess) -> None:
    finished = observed(node).requests.finished_total
    complete(node.http, "somebody else's prompt", 4)
    until("it is counted", lambda: observed(node).requests.finished_total == finished + 1)
    before = observed(node)
    first, second = ask(node), ask(node)
    assert (second.rounds_total - first.rounds_total, second.mismatches_total) == (1, 0)
    assert second.prompt_tokens == PROMPT
    none, mixed, full = second.last_round
    assert all(one.equal for one in (none, mixed, full))
    assert none.prefix_hit_tokens == mixed.prefix_hit_tokens == PROMPT - 16
    assert none.steps_none > none.steps_full + none.steps_mixed
    assert mixed.steps_mixed > mixed.steps_full + mixed.steps_none
    assert full.steps_full > full.steps_mixed + full.steps_none
    tick = node.status().loop.tick
    until("another tick", lambda: node.status().loop.tick > tick)
    after = observed(node)
    assert after.sessions.live <= before.sessions.live
    assert after.requests.finished_total == before.requests.finished_total
    assert not node.status().policy.frozen


def test_it_is_asked_by_itself_where_the_policy_says_so(node: ServeProcess) -> None:
    def rounds() -> int:
        canary = node.status().canary
        assert canary is not None
        return canary.rounds_total

    before = rounds()
    keys = {"canary.least_gap": "1s", "canary.every": "1s", "canary.enabled": "true"}
    with node.control_http() as control:
        for key, value in keys.items():
            body = {"actor": "test", "key": key, "value": value, "for_s": None}
            assert control.post("/v1/policy/set", json=body).status_code == 200
        until("two rounds have ended", lambda: rounds() >= before + 2)
        for key in reversed(keys):
            answer = control.post("/v1/policy/unset", json={"actor": "test", "key": key})
            assert answer.status_code == 200, answer.text
    canary = node.status().canary
    assert canary is not None
    assert canary.mismatches_total == canary.failed_total == 0
    assert canary.last_trigger in ("period", "start")
