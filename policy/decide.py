"""The policy engine's one entry: snapshot and memory in, decision and next memory out.

Pure and deterministic, so a journal of snapshots can be decided again with another policy.
It asks each lever for a proposal and lets modes, freezes, stale reports and levers that
need a restart have the last word. It applies nothing.
"""

from __future__ import annotations

from dataclasses import replace

from hisparsed.policy.admission import admission_for, propose_admission, start_order
from hisparsed.policy.bounds import (
    hot_bounds,
    hot_unit,
    lease_blocks,
    start_blocks,
)
from hisparsed.policy.decisions import Commands, Decision, LeverDecision, Proposal
from hisparsed.policy.memory import Direction, Memory, MoveHistory, observe
from hisparsed.policy.multiplier import propose_multiplier
from hisparsed.policy.reasons import Lever, Reason
from hisparsed.policy.schema import Mode, Policy
from hisparsed.policy.signals import Admission, Geometry, Snapshot
from hisparsed.policy.split import propose_split
from hisparsed.policy.watermark import DEFAULT, propose_watermark


def decide(policy: Policy, snapshot: Snapshot, memory: Memory) -> tuple[Decision, Memory]:
    """One tick: a decision for every lever, and the memory for the next tick.

    A stale snapshot leaves no trace in memory. Moves are remembered as made, because the
    next snapshot shows what came of them.
    """
    stale = snapshot.report_age_s > policy.stale_after
    if not stale:
        memory = observe(policy, snapshot, memory)
    admission_proposal, admission = propose_admission(policy, snapshot, memory)
    proposals = (
        propose_split(policy, snapshot, memory),
        propose_multiplier(policy, snapshot, memory),
        admission_proposal,
        propose_watermark(policy, snapshot),
    )
    decisions = tuple(_govern(policy, snapshot, proposal, stale) for proposal in proposals)
    split, multiplier = decisions[0], decisions[1]
    memory = replace(
        memory,
        split=_remember(memory.split, snapshot, split, grows_to=Direction.SAFETY),
        multiplier=_remember(memory.multiplier, snapshot, multiplier, grows_to=Direction.THRIFT),
    )
    decision = Decision(
        snapshot.at_s,
        snapshot.tick,
        snapshot.policy_generation,
        decisions,
        _commands(snapshot.geometry, decisions, admission),
    )
    return decision, memory


def start_commands(policy: Policy, geometry: Geometry) -> Commands:
    """What to put in force before the first tick, for levers that the policy may act on.

    Levers in another mode stay ``None``: the node keeps what its engine started with.
    """
    acts = frozenset(lever for lever in Lever if policy.mode_of(lever) is Mode.ACT)
    offload = start_blocks(policy, geometry) if Lever.SPLIT in acts else None
    lease = hot_bounds(policy, geometry).clamp(lease_blocks(geometry, policy.hot.start))
    admission = admission_for(policy, geometry.max_num_seqs, start_order(policy))
    return Commands(
        offload_target_blocks=offload,
        hisparse_target_blocks=None if offload is None else geometry.budget_blocks - offload,
        multiplier=lease * hot_unit(geometry) if Lever.MULTIPLIER in acts else None,
        watermark=policy.watermark.value if Lever.WATERMARK in acts else None,
        admission=admission if Lever.ADMISSION in acts else None,
    )


def _govern(policy: Policy, snapshot: Snapshot, proposal: Proposal, stale: bool) -> LeverDecision:
    """The final decision: what the lever proposes, unless something forbids it."""
    mode = policy.mode_of(proposal.lever)
    lever = proposal.lever
    if mode is Mode.OFF:
        return _still(proposal, Reason.OFF, f"Leave {lever} alone: its mode is off.")
    if stale:
        sentence = (
            f"Hold {lever}: the last report is {snapshot.report_age_s:.1f}s old, over "
            f"{policy.stale_after:g}s."
        )
        return _still(proposal, Reason.STALE, sentence)
    move = f"{proposal.action}, because {proposal.because}."
    if not proposal.reason.acts:
        return _decision(proposal, proposal.reason, _capitalised(move))
    if lever not in snapshot.live_levers:
        sentence = f"Needs a restart: {move}"
        return _decision(proposal, Reason.PENDING_RESTART, sentence)
    if lever in snapshot.frozen_levers:
        return _decision(proposal, Reason.FROZEN, f"Frozen; would {move}")
    if mode is Mode.ADVISE:
        return _decision(proposal, Reason.ADVISE_ONLY, f"Advice only: {move}")
    return _decision(proposal, proposal.reason, _capitalised(move))


def _decision(proposal: Proposal, reason: Reason, sentence: str) -> LeverDecision:
    return LeverDecision(
        proposal.lever,
        proposal.current,
        proposal.wanted,
        proposal.limited_by,
        reason,
        proposal.reason,
        proposal.figures,
        sentence,
    )


def _still(proposal: Proposal, reason: Reason, sentence: str) -> LeverDecision:
    held = replace(proposal, wanted=proposal.current, reason=reason, limited_by=None)
    return _decision(held, reason, sentence)


def _remember(
    history: MoveHistory, snapshot: Snapshot, decision: LeverDecision, *, grows_to: Direction
) -> MoveHistory:
    if not decision.acts:
        return history
    shrinks_to = Direction.THRIFT if grows_to is Direction.SAFETY else Direction.SAFETY
    grows = float(decision.wanted) > float(decision.current)
    return history.moved(snapshot.at_s, grows_to if grows else shrinks_to)


def _commands(
    geometry: Geometry, decisions: tuple[LeverDecision, ...], admission: Admission
) -> Commands:
    commands = Commands()
    for decision in decisions:
        if not decision.acts:
            continue
        if decision.lever is Lever.SPLIT:
            blocks = int(decision.wanted)
            commands = replace(
                commands,
                offload_target_blocks=blocks,
                hisparse_target_blocks=geometry.budget_blocks - blocks,
            )
        elif decision.lever is Lever.MULTIPLIER:
            commands = replace(commands, multiplier=float(decision.wanted))
        elif decision.lever is Lever.ADMISSION:
            commands = replace(commands, admission=admission)
        else:
            default = decision.wanted == DEFAULT
            commands = replace(commands, watermark="default" if default else int(decision.wanted))
    return commands


def _capitalised(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
