"""The metrics page: figures, bounded labels, and a document that is complete."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from hisparsed.control.metrics.table import METRICS
from hisparsed.control.status.document import (
    BackgroundStatus,
    CanaryState,
    CanaryStatus,
    EngineState,
    EngineStatus,
    Lifecycle,
)
from hisparsed.engine.cuda.nvml import GpuCard, GpusStatus
from hisparsed.engine.kernel_choice import KernelReason, KernelsStatus
from hisparsed.policy.signals import Lever, SampledRows
from tests.bench.metrics_docs import metrics_document

ROOT = Path(__file__).parents[3]
A_GPU = GpuCard(
    index=3,
    name="H200",
    uuid="GPU-3",
    memory_used_bytes=100,
    memory_total_bytes=141,
    utilization=0.5,
    pcie_rx_bytes_per_s=37e9,
    pcie_tx_bytes_per_s=1e9,
    slowed_by=["thermal-hardware"],
    lost=False,
)


KERNELS = KernelsStatus(
    asked="auto",
    used="vllm",
    reason=KernelReason.SLOWER,
    sentence="ours take 1.31 of vLLM's time",
    max_ratio=1.25,
    ratio=1.31,
)


def samples(node: Any) -> dict[tuple[str, tuple[str, ...]], float]:
    """By name and label values, the labels in alphabetic order."""
    text = generate_latest(node.metrics.registry).decode()
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_figures_of_a_running_node(node: Any) -> None:
    await node.loop.start()
    node.engine.target = 10
    await node.ticks(4)
    node.clock.now_s += 8
    seen = samples(node)
    block = 16 * 5_120
    target = node.engine.target
    assert seen["hisparsed_host_budget_bytes", ()] == 1_000 * block
    assert seen["hisparsed_pool_target_bytes", ("offload",)] == target * block
    assert seen["hisparsed_pool_capacity_bytes", ("hisparse",)] == (1_000 - target) * block
    assert seen["hisparsed_pool_reach_tokens", ("hisparse",)] == (1_000 - target) * 16
    assert seen["hisparsed_lent_blocks", ()] == target
    assert seen["hisparsed_multiplier_ratio", ()] == 2.0
    assert seen["hisparsed_residency_requests", ("none",)] == 1
    assert seen["hisparsed_hot_rows_total", ("load",)] == 60
    assert seen["hisparsed_pool_ghost_tokens_total", ("hisparse",)] == 320
    assert seen["hisparsed_pool_ghost_tokens_total", ("offload",)] == 0
    assert seen["hisparsed_gpu_head_need_blocks", ()] == 75
    assert seen["hisparsed_oldest_wait_seconds", ()] == 4
    assert seen["hisparsed_stalls_total", ()] == 2
    assert seen["hisparsed_stalls_resolved_total", ()] == 1
    assert seen["hisparsed_stalls_given_up_total", ()] == 1
    assert seen["hisparsed_report_age_seconds", ()] == 9.0
    assert seen["hisparsed_lifecycle", ("serving",)] == 1
    assert seen["hisparsed_lifecycle", ("draining",)] == 0
    assert seen["hisparsed_lever_mode", ("split", "act")] == 1
    assert seen["hisparsed_admission_order", ("arrival",)] == 1
    assert seen["hisparsed_tick_seconds_count", ()] == 4
    assert seen["hisparsed_policy_generation", ()] == 1
    assert ("hisparsed_coverage_ratio", ()) not in seen


async def test_moves_and_holds_are_counted_once_a_tick(node: Any) -> None:
    await node.loop.start()
    node.engine.target = 10
    await node.ticks(5)
    seen = samples(node)
    moves = {
        labels: value for (name, labels), value in seen.items() if name.endswith("moves_total")
    }
    holds = {
        labels: value for (name, labels), value in seen.items() if name.endswith("holds_total")
    }
    assert moves == {("to-offload", "split", "OffloadShortOfReach"): 1}
    assert sum(moves.values()) + sum(holds.values()) == 5 * 4
    assert seen["hisparsed_apply_seconds_count", ()] == 1


async def test_a_refused_move_is_no_move(node: Any) -> None:
    await node.loop.start()
    node.engine.target = 10
    node.engine.apply_trouble = [ValueError("not now")]
    await node.ticks(1)
    seen = samples(node)
    assert not [name for name, _ in seen if name == "hisparsed_moves_total"]
    assert seen["hisparsed_apply_failures_total", ()] == 1


def test_the_page_works_before_the_first_report(node: Any) -> None:
    node.lifecycle = Lifecycle.STARTING
    seen = samples(node)
    assert seen["hisparsed_lifecycle", ("starting",)] == 1
    assert ("hisparsed_gpu_blocks", ()) not in seen


async def test_rejected_policies_and_freezes_show(node: Any) -> None:
    await node.loop.start()
    node.policy_path.write_text("nonsense")
    node.operator.reload(actor="ann")
    node.operator.freeze([Lever.SPLIT], actor="ann")
    await node.ticks(1)
    seen = samples(node)
    assert seen["hisparsed_policy_reload_failures_total", ()] == 1
    assert seen["hisparsed_lever_frozen", ("split",)] == 1
    assert seen["hisparsed_lever_frozen", ("multiplier",)] == 0


async def test_every_metric_has_samples_and_stands_in_the_document(node: Any) -> None:
    schedule = "schedules: [{name: busy, when: {pressure: high}, set: {hot.max: 3}}]\n"
    node.policy_path.write_text(node.policy_path.read_text() + schedule)
    node.operator.reload(actor="ann")
    await node.loop.start()
    node.engine.target = 10
    node.engine.live_set_tokens = 10**6
    node.background = [BackgroundStatus(name="file watch")]
    node.canary = lambda: CanaryStatus(
        state=CanaryState.OK, sentence="equal", last_unix_s=1_700_000_000.0
    )
    node.gpus = GpusStatus(age_s=0.5, cards=[A_GPU])
    node.kernels = KERNELS
    sampled = SampledRows(hits_total=3, misses_total=1, h2d_bytes_total=656, age_s=40.0)
    node.engine.counters = replace(node.engine.counters, sampled_rows=sampled)
    node.engine_status = EngineStatus(
        state=EngineState.SERVING, since_unix_s=1_700_000_000.0, sentence="", last_start_s=12.0
    )
    await node.ticks(2)
    page = {name for name, _ in samples(node)}
    assert samples(node)["hisparsed_step_cpu_seconds", ("0.99",)] == 0.009
    missing = {metric.name for metric in METRICS} - page
    assert missing == set()
    document = (ROOT / "docs" / "metrics.md").read_text()
    assert document == metrics_document()
    for family in node.metrics.registry.collect():
        suffix = "_total" if family.type == "counter" else ""
        assert f"| `{family.name}{suffix}` | {family.type} |" in document


def test_counters_are_named_as_counters_and_units_are_base_units() -> None:
    for metric in METRICS:
        assert metric.name.endswith("_total") == metric.is_counter, metric.name
        assert not metric.name.endswith(("_ms", "_us", "_kib", "_gb")), metric.name


async def test_a_gpu_is_told_by_its_number_and_what_slows_it(node: Any) -> None:
    await node.loop.start()
    node.gpus = GpusStatus(age_s=0.5, cards=[A_GPU])
    await node.ticks(1)
    seen = samples(node)
    assert seen["hisparsed_gpu_memory_used_bytes", ("3",)] == 100
    assert seen["hisparsed_gpu_pcie_bytes_per_second", ("in", "3")] == 37e9
    assert seen["hisparsed_gpu_pcie_bytes_per_second", ("out", "3")] == 1e9
    assert seen["hisparsed_gpu_slowed", ("3", "thermal-hardware")] == 1
    assert seen["hisparsed_gpu_slowed", ("3", "power-cap")] == 0
    assert seen["hisparsed_gpu_lost", ("3",)] == 0
    assert seen["hisparsed_gpu_reading_age_seconds", ()] == 0.5


async def test_whose_kernels_run_is_a_metric_with_its_reason(node: Any) -> None:
    await node.loop.start()
    node.kernels = KERNELS
    await node.ticks(1)
    seen = samples(node)
    assert seen["hisparsed_hot_kernels", ("vllm", "Slower")] == 1
    assert seen["hisparsed_hot_kernels_ratio", ()] == 1.31
    assert seen["hisparsed_offload_copies_trusted", ()] == 1


async def test_what_a_lost_gpu_no_longer_tells_is_left_out(node: Any) -> None:
    unknown = dict.fromkeys(
        (
            "memory_used_bytes",
            "memory_total_bytes",
            "utilization",
            "pcie_rx_bytes_per_s",
            "pcie_tx_bytes_per_s",
            "slowed_by",
        )
    )
    lost = A_GPU.model_copy(update={**unknown, "lost": True})
    await node.loop.start()
    node.gpus = GpusStatus(age_s=0.5, cards=[lost])
    await node.ticks(1)
    told = {name for name, _ in samples(node) if name.startswith("hisparsed_gpu_")}
    assert "hisparsed_gpu_lost" in told
    assert not told & {
        "hisparsed_gpu_memory_used_bytes",
        "hisparsed_gpu_pcie_bytes_per_second",
        "hisparsed_gpu_slowed",
        "hisparsed_gpu_utilization_ratio",
    }


async def test_rows_that_nobody_counts_are_left_out_and_not_zero(node: Any) -> None:
    hot = (await node.engine.report()).hot
    node.engine.changes = {"hot": replace(hot, counted=False)}
    sampled = SampledRows(hits_total=30, misses_total=10, h2d_bytes_total=656, age_s=40.0)
    node.engine.counters = replace(node.engine.counters, sampled_rows=sampled)
    await node.loop.start()
    await node.ticks(1)
    seen = samples(node)
    assert not {name for name, _ in seen} & {
        "hisparsed_hot_rows_total",
        "hisparsed_hot_references_total",
        "hisparsed_h2d_bytes_total",
    }
    assert seen["hisparsed_hot_sample_age_seconds", ()] == 40.0
    shown = node.current.status().observed
    assert (shown.hot.counted, shown.sampled_rows.hits_total) == (False, 30)
