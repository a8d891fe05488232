"""One policy on one workload on one simulated node: sizes it, starts it, measures it.

Everything that decides the outcome is in ``Scenario``, ``PolicyChoice`` and the seed. Imports
vLLM, which takes its time; what only reads options does not need this module.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path

from hisparsed.control.board import TickOutcome
from hisparsed.engine.messages import EngineCommand
from hisparsed.engine.scratch import scratch_block_count
from hisparsed.engine.simulated.node import SimulatedNode
from hisparsed.engine.simulated.vllm_config import SimulatedOptions, scaled_seqs, step_tokens
from hisparsed.errors import UserError
from hisparsed.plan.layout import real_layout, stock_copies
from hisparsed.policy.bounds import engine_multiplier
from hisparsed.policy.effective import parse_policy
from hisparsed.policy.reasons import Lever
from hisparsed.simulate.control_side import ControlSide, LoopControl, StaticControl
from hisparsed.simulate.driver import Driver
from hisparsed.simulate.measures import Measures
from hisparsed.simulate.policies import PolicyChoice
from hisparsed.simulate.scenario import Scenario
from hisparsed.simulate.workload import ClosedLoop, Mixed, OpenLoop, Players

MOST_LEASE_ROWS = 32_704
"""Slots of a hot buffer are numbered in 16 bits."""


def run_policy(
    scenario: Scenario,
    policy: PolicyChoice,
    seed: int,
    *,
    work_folder: Path,
    journal_folder: Path | None = None,
    progress: Callable[[float], None] = lambda _seconds: None,
) -> Measures:
    """Simulate; ``work_folder`` takes files that vLLM and the policy are read from.

    Raises ``UserError`` where the sizes do not fit, ``ConfigError`` for a wrong policy.
    """
    if scenario.warmup_s >= scenario.duration_s:
        raise UserError(
            f"--warmup: {scenario.warmup_s:g}s leaves nothing of {scenario.duration_s:g}s"
        )
    host_budget, command = policy.store.host_budget or scenario.host_budget, None
    if policy.text is None and policy.hisparse:
        host_budget, lent = _stock_sizes(scenario, policy, host_budget)
        command = EngineCommand(offload_target_blocks=lent)
    options = SimulatedOptions(
        node=scenario.node,
        model_folder=work_folder / "model",
        host_budget_bytes=host_budget,
        max_lease_rows=_lease_rows(scenario, policy) if policy.hisparse else 0,
        max_model_len=_max_model_len(scenario),
        scale=scenario.scale,
        offload_prompt_only=scenario.offload_prompt_only or policy.store.prompt_only,
        eviction=policy.store.eviction,
        store_threshold=policy.store.threshold,
        # What stock vLLM's copies cost is in its sizes.
        copies=1 if policy.text is None else policy.store.copies or 1,
        hisparse=policy.hisparse,
        scratch=policy.text is not None,
        seed=seed,
    )
    try:
        node = SimulatedNode(options)
    except ValueError as error:
        raise UserError(f"vLLM cannot start this node: {error}") from error
    measures = Measures(scenario.warmup_s, scenario.duration_s)
    control: ControlSide
    if policy.text is None:
        control = StaticControl(node, command)
    else:
        path = work_folder / "policy.yaml"
        path.write_text(policy.text)
        control = LoopControl(
            node,
            path,
            run=f"{policy.name}-{seed}",
            title=scenario.node.title,
            journal_folder=journal_folder,
            watch=_watch(measures),
        )
    try:
        driver = Driver(
            node,
            control,
            _players(scenario, seed),
            measures,
            think_scale=scenario.think_scale,
            progress=progress,
        )
        driver.run()
    finally:
        control.close()
        node.shutdown()
        # vLLM freezes the heap at start; the next run's would come on top of this one's.
        gc.unfreeze()
    measures.journal_lost = control.journal_lost
    return measures


def _players(scenario: Scenario, seed: int) -> Players:
    share = float(scenario.scale)
    parts: list[Players] = []
    for number, one in enumerate(scenario.traffic):
        until_s = min(one.until_s, scenario.duration_s)
        name = f"{number}/" if len(scenario.traffic) > 1 else ""
        if one.users is None:
            parts.append(
                OpenLoop(
                    one.sessions,
                    seed,
                    load=one.load,
                    share=share,
                    from_s=one.from_s,
                    until_s=until_s,
                    name=name,
                )
            )
        else:
            parts.append(
                ClosedLoop(
                    one.sessions,
                    max(1, round(one.users * share)),
                    seed,
                    ramp_s=scenario.warmup_s / 2,
                    from_s=one.from_s,
                    until_s=until_s,
                    name=name,
                )
            )
    return parts[0] if len(parts) == 1 else Mixed(parts)


def _max_model_len(scenario: Scenario) -> int:
    """As asked for, or the longest call: a longer limit only raises vLLM's floors."""
    tokens, most = scenario.node.engine.block_tokens, scenario.node.model.max_model_len
    longest = -(-(scenario.max_model_len or scenario.longest) // tokens) * tokens
    if longest > most:
        asked = "" if scenario.max_model_len is None else "--max-model-len: "
        raise UserError(
            f"{asked}calls of {longest} tokens are more than the {most} that the model takes; set "
            f"--max-model-len to {most} or less"
        )
    return longest


def _lease_rows(scenario: Scenario, policy: PolicyChoice) -> int:
    """The largest lease: the policy's, or vLLM's own; no more than the scaled node can admit."""
    node = scenario.node
    topk, query = node.model.topk, node.query_len
    wanted = (query + 1) * topk
    if policy.text is not None:
        variants = parse_policy(policy.text, policy.name).variants.values()
        wanted = math.ceil(max(engine_multiplier(one, query) for one in variants) * topk)
    least = query * topk
    layout = real_layout(node, 1)
    tokens = layout.block_tokens
    window = layout.pages(min(step_tokens(node, scenario.scale), _max_model_len(scenario)))
    scratch = scratch_block_count(
        query_len=query,
        topk=topk,
        block_tokens=tokens,
        max_num_seqs=scaled_seqs(node, scenario.scale),
    )
    room = int(layout.gpu_blocks * scenario.scale) - scratch - 1
    room -= layout.pages(_max_model_len(scenario)) + layout.hot_groups * (window + 2)
    most = room // layout.hot_groups * tokens
    if most < least:
        raise UserError(
            f"--scale: {scenario.scale} of this node's GPU memory cannot admit one call of "
            f"{_max_model_len(scenario)} tokens with {least} hot rows; use a larger scale or a "
            "smaller --max-model-len"
        )
    # vLLM takes no less than the worst step, though with scratch a lease may be smaller.
    return max(least, min(wanted, most, MOST_LEASE_ROWS))


def _stock_sizes(scenario: Scenario, policy: PolicyChoice, budget: int) -> tuple[int, int]:
    """Host bytes and lent blocks that hold as much as stock vLLM's two pools do.

    Stock pools are apart, padded to pages and hold a copy of the indexer for each GPU; here the
    same number of blocks and chunks is put into one budget.
    """
    copies = policy.store.copies or stock_copies(scenario.node)
    layout = real_layout(scenario.node, copies)
    model, tokens = scenario.node.model, layout.block_tokens
    host_block = model.layers * model.row_bytes * tokens
    chunk = len(model.index_leaders()) * model.index_row_bytes * tokens
    hisparse_bytes = int(budget * policy.hisparse_share)
    blocks = hisparse_bytes // layout.host_block_bytes
    chunks = (budget - hisparse_bytes) // (layout.chunk_bytes * layout.copies)
    lent = math.ceil(chunks / (host_block // chunk))
    return (blocks + lent) * host_block, int(lent * scenario.scale)


def _watch(measures: Measures) -> Callable[[TickOutcome], None]:
    def look(outcome: TickOutcome) -> None:
        acting = [one for one in outcome.record.decision.levers if one.acts]
        moving = [one for one in acting if one.lever in (Lever.SPLIT, Lever.MULTIPLIER)]
        measures.moves += len(moving)
        for one in acting:
            measures.sentences.append((outcome.record.snapshot.at_s, one.sentence))

    return look
