"""The transition watermark: the policy's value, or vLLM's own; no law moves it.

Measurements showed no gain from moving it, so it is only set.
"""

from __future__ import annotations

from hisparsed.policy.decisions import Proposal, Reason
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Lever, Snapshot

DEFAULT = "default"


def propose_watermark(policy: Policy, snapshot: Snapshot) -> Proposal:
    """GPU blocks, or ``"default"`` for vLLM's own value."""
    current = DEFAULT if snapshot.watermark.is_default else snapshot.watermark.blocks
    wanted = DEFAULT if policy.watermark.value is None else policy.watermark.value
    figures = {"watermark_blocks": float(snapshot.watermark.blocks)}
    if wanted == current:
        return Proposal(
            Lever.WATERMARK,
            current,
            wanted,
            Reason.AT_TARGET,
            None,
            figures,
            f"keep the transition watermark at {current}",
            "it is the value of the policy",
        )
    return Proposal(
        Lever.WATERMARK,
        current,
        wanted,
        Reason.POLICY_VALUE,
        None,
        figures,
        f"set the transition watermark to {wanted} instead of {current}",
        "the policy sets it",
    )
