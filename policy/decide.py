"""The policy engine's one entry: snapshot and memory in, decision and next memory out.

Pure and deterministic, so a journal of snapshots can be decided again with another policy. It asks
each lever for a proposal; modes, freezes, stale reports and levers that need a restart overrule it.
It applies nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hisparsed.policy import expectation
from hisparsed.policy.admission import left_in_force, propose_admission
from hisparsed.policy.bounds import (
    reserve_blocks,
    shared_blocks,
)
from hisparsed.policy.decisions import Decision, EngineCommand, LeverDecision, Proposal, Reason
from hisparsed.policy.guards import stalled
from hisparsed.policy.memory import Direction, Memory, remember
from hisparsed.policy.multiplier import propose_multiplier
from hisparsed.policy.restart_size import propose_restart_size
from hisparsed.policy.schema import Mode, Policy
from hisparsed.policy.signals import AdmissionRules, Lever, Snapshot
from hisparsed.policy.split import PROBING, propose_split, reserve_differs
from hisparsed.policy.watermark import DEFAULT, propose_watermark

_BY_ORDER = frozenset({Reason.OUTSIDE_BOUNDS, Reason.POLICY_VALUE, Reason.FIXED_SPLIT})
"""Moves that an operator asked for; a stall does not prevent them."""


def decide(policy: Policy, snapshot: Snapshot, memory: Memory) -> tuple[Decision, Memory]:
    """One tick: a decision for every lever, and the memory for the next tick.

    A stale snapshot leaves no trace in memory. Moves are remembered as made; the next snapshot
    shows their effect.
    """
    stale = snapshot.report_age_s > policy.stale_after
    if not stale:
        memory = expectation.judge_moves(policy, snapshot, remember(policy, snapshot, memory))
    stall = stalled(policy, snapshot, memory)
    admission_proposal, admission = propose_admission(policy, snapshot, memory)
    if snapshot.geometry.hot_live or snapshot.hot.counted:
        multiplier_proposal, leases = propose_multiplier(policy, snapshot, memory)
    else:
        multiplier_proposal, leases = propose_restart_size(policy, snapshot, memory), None
    proposals = (
        propose_split(policy, snapshot, memory),
        multiplier_proposal,
        admission_proposal,
        propose_watermark(policy, snapshot),
    )
    decisions = tuple(
        _govern(policy, snapshot, _told(snapshot, memory, proposal), stale, stall)
        for proposal in proposals
    )
    decisions = tuple(
        replace(one, outcome=expectation.outcome_now(snapshot, memory, one.lever))
        for one in decisions
    )
    decision = Decision(
        snapshot.at_s,
        snapshot.tick,
        snapshot.policy_generation,
        decisions,
        _commands(policy, snapshot, decisions, admission, leases),
    )
    return decision, _remember(memory, snapshot, decisions)


def _told(snapshot: Snapshot, memory: Memory, proposal: Proposal) -> Proposal:
    """With the verdict on the lever's last move, in the tick in which it is judged."""
    verdict = expectation.verdict(snapshot, memory, proposal.lever)
    return replace(proposal, because=proposal.because + verdict) if verdict else proposal


def _govern(
    policy: Policy, snapshot: Snapshot, proposal: Proposal, stale: bool, stall: str | None
) -> LeverDecision:
    """The final decision: the lever's proposal, unless something forbids it."""
    mode = policy.mode_of(proposal.lever)
    lever = proposal.lever
    if mode is Mode.OFF:
        sentence = f"Leave {lever} alone: its mode is off."
        left = left_in_force(snapshot) if lever is Lever.ADMISSION else ""
        if left:
            sentence = f"Leave admission alone: its mode is off; still in force: {left}."
        return _still(proposal, Reason.OFF, sentence)
    if stale:
        sentence = (
            f"Hold {lever}: the last report is {snapshot.report_age_s:.1f}s old, over "
            f"{policy.stale_after:g}s."
        )
        return _still(proposal, Reason.STALE, sentence)
    if stall is not None and proposal.reason not in _BY_ORDER:
        return _still(proposal, Reason.STALLED, f"Hold {lever}: {stall}.")
    if lever is Lever.SPLIT and not snapshot.geometry.lends:
        sentence = "Lend nothing: copies of indexer chunks are not proved on this machine."
        return _still(proposal, Reason.UNPROVED, sentence)
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
        expected=proposal.expected if reason.acts else {},
    )


def _still(proposal: Proposal, reason: Reason, sentence: str) -> LeverDecision:
    held = replace(proposal, wanted=proposal.current, reason=reason, limited_by=None)
    return _decision(held, reason, sentence)


def _remember(memory: Memory, snapshot: Snapshot, decisions: tuple[LeverDecision, ...]) -> Memory:
    """The memory after these decisions: moves, and what they are to bring."""
    at_s = snapshot.at_s
    for one in decisions:
        shared = one.reason is Reason.SHARED_BY_GAIN
        if not one.acts or (one.wanted == one.current and not shared):
            continue
        if shared:
            memory = replace(memory, sharing=memory.sharing.moved(at_s, Direction.THRIFT))
        elif one.lever is Lever.SPLIT:
            direction = _direction(one, grows_to=Direction.SAFETY)
            moved = memory.split.moved(at_s, direction, probing=one.reason in PROBING)
            memory = replace(memory, split=moved)
        elif one.lever is Lever.MULTIPLIER:
            direction = _direction(one, grows_to=Direction.THRIFT)
            memory = replace(memory, multiplier=memory.multiplier.moved(at_s, direction))
        elif one.lever is Lever.ADMISSION:
            memory = replace(memory, admission=memory.admission.moved(at_s, Direction.SAFETY))
        memory = expectation.begun(snapshot, memory, one)
    return memory


def _direction(decision: LeverDecision, *, grows_to: Direction) -> Direction:
    shrinks_to = Direction.THRIFT if grows_to is Direction.SAFETY else Direction.SAFETY
    return grows_to if float(decision.wanted) > float(decision.current) else shrinks_to


def _commands(
    policy: Policy,
    snapshot: Snapshot,
    decisions: tuple[LeverDecision, ...],
    admission: AdmissionRules,
    leases: Mapping[str, int] | None,
) -> EngineCommand:
    commands = EngineCommand()
    for decision in decisions:
        if not decision.acts:
            continue
        if decision.lever is Lever.SPLIT:
            commands = _split_command(policy, snapshot, commands, int(decision.wanted))
        elif decision.lever is Lever.MULTIPLIER and leases is not None:
            commands = replace(commands, hot_leases=leases)
        elif decision.lever is Lever.MULTIPLIER:
            commands = replace(commands, multiplier=float(decision.wanted))
        elif decision.lever is Lever.ADMISSION:
            commands = replace(commands, admission=admission)
        else:
            default = decision.wanted == DEFAULT
            commands = replace(commands, watermark="default" if default else int(decision.wanted))
    return commands


def _split_command(
    policy: Policy, snapshot: Snapshot, commands: EngineCommand, offload_blocks: int
) -> EngineCommand:
    commands = replace(
        commands,
        offload_target_blocks=offload_blocks,
        hisparse_target_blocks=shared_blocks(policy, snapshot.geometry) - offload_blocks,
    )
    if reserve_differs(policy, snapshot) is None:
        return commands
    return replace(
        commands,
        reserve_target_blocks=reserve_blocks(policy, snapshot.geometry),
        release_reserve=policy.pools.release_reserve and snapshot.reserve.can_release,
    )


def _capitalised(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
