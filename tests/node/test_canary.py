"""The canary of a real node: asked through the command line, answered by the engine's process."""

from __future__ import annotations

import json

import pytest
from serve_process import ServeProcess, hisparsed
from streaming import complete

from hisparsed.control.status import CanaryStatus

pytestmark = pytest.mark.engine


def ask(node: ServeProcess) -> CanaryStatus:
    result = hisparsed("canary", "--now", "--json", "--socket", str(node.files.socket))
    assert result.returncode == 0, result.stderr + result.stdout
    return CanaryStatus.model_validate(json.loads(result.stdout))


def test_a_node_answers_its_canary_alike_in_every_residency(node: ServeProcess) -> None:
    complete(node.http, "somebody else's prompt", 4)
    before = node.status().observed
    first, second = ask(node), ask(node)
    assert (second.rounds_total - first.rounds_total, second.mismatches_total) == (1, 0)
    assert second.prompt_tokens == 2048 // 4
    none, mixed, full = second.last_round
    assert all(one.equal for one in (none, mixed, full))
    assert none.prefix_hit_tokens == mixed.prefix_hit_tokens == 512 - 16
    assert none.steps_none > none.steps_full + none.steps_mixed
    assert mixed.steps_mixed > mixed.steps_full + mixed.steps_none
    assert full.steps_full > full.steps_mixed + full.steps_none
    after = node.status().observed
    assert before is not None
    assert after is not None
    assert after.sessions.live <= before.sessions.live
    assert after.requests.finished_total == before.requests.finished_total
    assert not node.status().policy.frozen
