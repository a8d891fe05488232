"""Remembered look-ups: never another answer than vLLM's own, block by block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small import agents, small_node
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from hisparsed.engine.simulated import lookups
from hisparsed.engine.simulated.lookups import RememberedLookups
from hisparsed.simulate.policies import choose_policy
from hisparsed.simulate.run import run_policy
from hisparsed.simulate.scenario import Scenario, Traffic
from hisparsed.simulate.workload import Sessions

pytestmark = pytest.mark.engine


def test_every_answer_is_vllms_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More sessions that the pools hold, so prefixes are lost while calls wait."""
    node = small_node()
    remembered = RememberedLookups.find_longest_cache_hit
    asked: list[int] = []

    def compared(self: Any, **question: Any) -> Any:
        found = remembered(self, **question)
        own = FullAttentionManager.find_longest_cache_hit(**question)
        assert found == own
        assert all(a is b for a, b in zip(found[0][0], own[0][0], strict=True))
        asked.append(own[1])
        return found

    monkeypatch.setattr(lookups.RememberedLookups, "find_longest_cache_hit", compared)
    traffic = (Traffic(Sessions(agents(9, 6, first=1200), 64), 9),)
    scenario = Scenario(node, traffic, node.host.budget, duration_s=40.0, warmup_s=10.0)
    run_policy(scenario, choose_policy("policy"), 0, work_folder=tmp_path)
    assert len(asked) > 1000
    assert len(set(asked)) > 8
