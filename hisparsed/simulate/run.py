"""One policy on one workload on one simulated node: starts it, measures it.

Everything that decides the outcome is in ``Scenario``, ``PolicyChoice`` and the seed. Imports
vLLM, which takes its time; what only reads options does not need this module.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

from hisparsed.control.board import TickOutcome
from hisparsed.engine.messages import EngineCommand
from hisparsed.engine.simulated.node import SimulatedNode
from hisparsed.engine.simulated.vllm_config import SimulatedOptions
from hisparsed.errors import UserError
from hisparsed.policy.reasons import Lever
from hisparsed.simulate.control_side import ControlSide, LoopControl, StaticControl
from hisparsed.simulate.driver import Driver
from hisparsed.simulate.measures import Measures
from hisparsed.simulate.policies import PolicyChoice
from hisparsed.simulate.scenario import Scenario
from hisparsed.simulate.sizes import fitting_sizes
from hisparsed.simulate.workload import ClosedLoop, Mixed, OpenLoop, Players


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
    sizes, command = fitting_sizes(scenario, policy), None
    if sizes.lent_blocks is not None:
        command = EngineCommand(offload_target_blocks=sizes.lent_blocks)
    options = SimulatedOptions(
        node=scenario.node,
        model_folder=work_folder / "model",
        host_budget_bytes=sizes.host_budget,
        max_lease_rows=sizes.lease_rows,
        max_model_len=sizes.max_model_len,
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
        raise UserError(f"--policy {policy.name}: vLLM cannot start this node: {error}") from error
    measures = Measures(scenario.warmup_s, scenario.duration_s)
    control: ControlSide
    if sizes.policy_text is None:
        control = StaticControl(node, command)
    else:
        path = work_folder / "policy.yaml"
        path.write_text(sizes.policy_text)
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
    except UserError as error:
        # Where the policy lies here is nobody's business: it was read from an option.
        text = str(error).replace(str(work_folder / "policy.yaml"), "the policy")
        raise UserError(f"--policy {policy.name}: {text}") from error
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


def _watch(measures: Measures) -> Callable[[TickOutcome], None]:
    def look(outcome: TickOutcome) -> None:
        acting = [one for one in outcome.record.decision.levers if one.acts]
        moving = [one for one in acting if one.lever in (Lever.SPLIT, Lever.MULTIPLIER)]
        measures.count_moves(outcome.record.snapshot.at_s, len(moving))
        for one in acting:
            measures.sentences.append((outcome.record.snapshot.at_s, one.sentence))

    return look
