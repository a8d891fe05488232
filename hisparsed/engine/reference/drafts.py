"""Drafts of the reference node: tokens that may follow, proposed without a model.

A draft is the continuation of the same last tokens earlier in the same request. It is accepted
where it equals what the sampler chooses there, so the tokens are those of decoding one by one. Most
drafts are wrong, as a test of rejected rows needs. vLLM's own n-gram proposer is not used, because
numba's thread pool resets the number of torch's threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hisparsed.engine.reference.requests import RequestState


@dataclass
class DraftCounts:
    """Drafts since the engine started."""

    proposed: int = 0
    accepted: int = 0

    def count(self, proposed: int, accepted: int) -> None:
        self.proposed += proposed
        self.accepted += accepted


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
