"""Verification of speculative rows: how many drafts of a request are the model's own tokens.

A draft is accepted where it equals what the sampler chooses there, so the tokens are those of
decoding one by one, greedy or seeded. Proposing drafts is ``draft``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hisparsed.engine.reference.sampler import SamplingParams, choose


@dataclass
class DraftCounts:
    """Drafts since the engine started."""

    proposed: int = 0
    accepted: int = 0

    def count(self, proposed: int, accepted: int) -> None:
        self.proposed += proposed
        self.accepted += accepted


def verify(
    logits: Sequence[torch.Tensor],
    drafts: Sequence[int],
    allowed: torch.Tensor,
    params: SamplingParams,
    *,
    request_id: str,
    generated: int,
) -> list[int]:
    """The tokens of one request's step: the accepted drafts and one more.

    ``logits`` ``[vocab]`` of the last certain token and of each draft; the rest as in
    ``sampler.choose``.
    """
    tokens: list[int] = []
    for index, row in enumerate(logits):
        token = choose(row, allowed, params, request_id=request_id, generated=generated + index)
        tokens.append(token)
        if index == len(drafts) or drafts[index] != token:
            break
    return tokens
