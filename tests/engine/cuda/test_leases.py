"""vLLM's scheduler with our connector: its workers always know every request's hot blocks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import conversations
import pytest
from conversations import EngineShape, apply, build_engine, converse, core_of, make_conversations
from conversations import report as report_of

from hisparsed.engine.cuda.launch import CONNECTOR_MODULE
from hisparsed.engine.cuda.residency.vllm_hooks import LeasedMetadata
from hisparsed.engine.cuda.residency.worker import KnownLeases, SentLeases

pytestmark = pytest.mark.engine


def test_news_names_new_requests_and_changed_sizes_only() -> None:
    sent = SentLeases()
    held = {"a": (2, 2), "b": (0, 0)}
    first = sent.updates(["a", "b"], fresh=["a", "b"], ended=(), held=held.__getitem__)
    assert [(one.request_id, one.fresh) for one in first.leases] == [("a", True), ("b", True)]
    assert sent.updates(["a", "b"], fresh=(), ended=(), held=held.__getitem__).leases == ()
    held["b"] = (3, 3)
    (grown,) = sent.updates(["a", "b"], fresh=(), ended=(), held=held.__getitem__).leases
    assert (grown.request_id, grown.fresh, grown.blocks) == ("b", False, (3, 3))


def test_a_preempted_request_comes_back_as_a_new_one() -> None:
    sent, known = SentLeases(), KnownLeases()
    known.take(sent.updates(["a"], fresh=["a"], ended=(), held=lambda _: (5,)))
    known.take(sent.updates([], fresh=(), ended=["a"], held=lambda _: (5,)))
    assert known.blocks == {}
    (again,) = sent.updates(["a"], fresh=["a"], ended=(), held=lambda _: (2,)).leases
    assert again.fresh


def configured(patch: pytest.MonkeyPatch, **options: Any) -> None:
    """Engines of this test have our connector and these options of the node."""
    build = conversations.build_vllm_config

    def with_ours(reference_options: Any) -> Any:
        built = build(reference_options)
        (hisparse, *_) = built.kv_transfer_config.kv_connector_extra_config["connectors"]
        hisparse["kv_connector_module_path"] = CONNECTOR_MODULE
        built.additional_config["hisparsed"] |= options
        return built

    patch.setattr(conversations, "build_vllm_config", with_ours)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_workers_know_every_lease_while_leases_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    configured(monkeypatch)
    engine = build_engine(
        tmp_path, EngineShape(gpu_blocks=420, host_budget_bytes=20 << 20, ack_lag_steps=3)
    )
    apply(engine, {"offload_target_blocks": 400, "multiplier": 2.0})
    core, known = core_of(engine), KnownLeases()
    executor = core.model_executor
    run, resize = executor.execute_model, executor.resize_hot
    checked = 0

    def execute_model(output: Any, *args: Any, **options: Any) -> Any:
        nonlocal checked
        (hisparse, _) = output.kv_connector_metadata.metadata
        assert isinstance(hisparse, LeasedMetadata)
        known.take(hisparse.lease_updates)
        managers = core.scheduler.hisparsed._hot
        for name in output.num_scheduled_tokens:
            held = tuple(len(manager.req_to_blocks.get(name, ())) for manager in managers)
            assert known.blocks[name] == held
            checked += sum(held) > 0
        return run(output, *args, **options)

    def resize_hot(leases: dict[str, int]) -> None:
        resize(leases)
        for name, blocks in leases.items():
            known.shrunk(name, blocks)

    monkeypatch.setattr(executor, "execute_model", execute_model)
    monkeypatch.setattr(executor, "resize_hot", resize_hot)
    rng = random.Random(seed)

    def between_steps(step: int) -> None:
        if step % 5 == 0:
            apply(engine, {"multiplier": rng.choice([1.0, 1.5, 2.0, 3.0])})

    calls = make_conversations(count=6, turns=2, first=400, later=60, answer=20, seed=5)
    converse(engine, calls, between_steps)
    assert checked > 100
    assert len(known.blocks) <= 1, "ended ones are forgotten; no step told of the last one's end"


def test_on_vllms_kernels_the_multiplier_cannot_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured(monkeypatch, kernels="vllm")
    engine = build_engine(tmp_path, EngineShape(gpu_blocks=600))
    before = report_of(engine)
    assert before["geometry"]["hot_live"] is False
    assert before["hot"]["lease_blocks"] == before["geometry"]["max_lease_blocks"]
    multiplier = before["hot"]["multiplier"]
    for command in ({"multiplier": multiplier / 2}, {"hot_leases": {"r": 4}}):
        with pytest.raises(ValueError, match=r"know one hot lease, 16 blocks or 4x top-k"):
            apply(engine, command)
    apply(engine, {"multiplier": multiplier, "offload_target_blocks": 100})
    sizes: set[int] = set()

    def between_steps(step: int) -> None:
        managers = core_of(engine).scheduler.hisparsed._hot
        sizes.update(len(held) for held in managers[0].req_to_blocks.values() if held)

    calls = make_conversations(count=3, turns=2, first=300, later=40, answer=12, seed=3)
    converse(engine, calls, between_steps)
    assert sizes == {16}, "every lease has the one size"
