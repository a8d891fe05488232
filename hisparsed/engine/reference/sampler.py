"""Choosing the next token of the reference model: greedy, or seeded sampling.

Greedy ties go to the lowest token id, so the choice is a function of the logits alone.
Penalties, logprobs and structured output are not supported; ``request_check`` refuses requests
that ask for them before they reach the engine.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from hisparsed.engine.reference.tokenizer import EOS_TOKEN_ID, VOCAB_SIZE

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
