"""Sampling of the reference model: choosing tokens, drafting them, and verifying drafts.

Greedy, or seeded sampling; greedy ties go to the lowest token id, so the choice is a function of
the logits alone. Penalties, logprobs and structured output are not supported; ``request_check``
refuses requests that ask for them.

A draft is what followed the same last tokens before, in the same request. It is accepted where
it equals what the sampler chooses there, so the tokens are those of decoding one by one. Most
drafts are wrong: what a test of rejected rows needs. vLLM's own n-gram proposer is not used,
because numba's thread pool resets the number of torch's threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from hisparsed.engine.reference.model_folder import EOS_TOKEN_ID, VOCAB_SIZE
from hisparsed.engine.reference.requests import RequestState

_LOGIT_SCALE = 1.0 / 4000.0
"""Integer logits to the natural units that temperature expects."""


class SamplingParams(Protocol):
    """The part of vLLM's ``SamplingParams`` that is honoured here."""

    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    min_tokens: int


def printable_mask() -> torch.Tensor:
    """Bool ``[VOCAB_SIZE]``: printable ASCII, newline and end of sequence."""
    mask = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    mask[32:127] = True
    mask[10] = True
    mask[EOS_TOKEN_ID] = True
    return mask


def choose(
    logits: torch.Tensor,
    allowed: torch.Tensor,
    params: SamplingParams,
    *,
    request_id: str,
    generated: int,
) -> int:
    """Next token id from integer logits ``[vocab]``.

    ``generated`` counts tokens produced so far: with the request's seed (or its id) it fixes
    the random number, so a preempted and resumed request samples the same tokens again.
    """
    masked = logits.masked_fill(~allowed, float("-inf"))
    if generated < params.min_tokens:
        masked[EOS_TOKEN_ID] = float("-inf")
    if params.temperature < 1e-5:
        return int((masked == masked.max()).nonzero()[0, 0])
    values = masked.double().numpy() * (_LOGIT_SCALE / params.temperature)
    order = np.argsort(-values, kind="stable")
    probabilities = np.exp(values[order] - values[order[0]])
    probabilities /= probabilities.sum()
    keep = np.cumsum(probabilities) - probabilities < params.top_p
    if params.top_k > 0:
        keep[params.top_k :] = False
    keep[0] = True
    probabilities = np.where(keep, probabilities, 0.0)
    entropy = list((str(params.seed) if params.seed is not None else request_id).encode())
    rng = np.random.Generator(np.random.PCG64([generated, *entropy]))
    return int(order[rng.choice(len(order), p=probabilities / probabilities.sum())])


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


LONGEST_MATCH = 3


class Draft(Protocol):
    """Any source of drafts; it changes how fast tokens come, never which."""

    def propose(self, requests: Sequence[RequestState]) -> list[list[int]]:
        """Tokens that may follow each request's last, in order; empty for none."""


@dataclass
class _Index:
    """Where each run of at most ``LONGEST_MATCH`` tokens was last followed by another."""

    owner: RequestState
    indexed: int = 0
    follows: dict[tuple[int, ...], int] = field(default_factory=dict)

    def extend(self, tokens: Sequence[int]) -> None:
        for end in range(self.indexed + 1, len(tokens)):
            for length in range(1, min(LONGEST_MATCH, end) + 1):
                self.follows[tuple(tokens[end - length : end])] = end
        self.indexed = max(self.indexed, len(tokens) - 1)


class NgramDraft:
    """The continuation of the latest longest match, up to ``count`` tokens."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._indexes: dict[int, _Index] = {}

    def propose(self, requests: Sequence[RequestState]) -> list[list[int]]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: RequestState) -> list[int]:
        index = self._indexes.get(request.row)
        if index is None or index.owner is not request:
            index = self._indexes[request.row] = _Index(request)
        tokens = request.tokens
        index.extend(tokens)
        for length in range(min(LONGEST_MATCH, len(tokens)), 0, -1):
            start = index.follows.get(tuple(tokens[-length:]))
            if start is not None:
                return tokens[start : start + self._count]
        return []
