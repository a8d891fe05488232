"""Requests of the reference executor: tokens, block tables, residency, and their part in a step.

One state row per request, reused after it finishes; the struct of arrays is what the residency
resolver in ``hisparsed.kernels`` reads. Follows vLLM's worker contract: block tables only grow,
residency changes come as updates, a preempted request returns as new.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class RequestState:
    """One request as the executor knows it."""

    row: int
    tokens: list[int]
    params: Any
    prompt_len: int
    known: int
    """Tokens that must be computed before the next one may be sampled."""
    hot_blocks: list[list[int]] = field(default_factory=list)
    prompt_logprobs: Any = None
    """vLLM's ``LogprobsTensors`` of a prompt that is being computed, where the call asks for it."""

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len


class RequestTables:
    """All running requests. ``groups`` is the number of index groups.

    Tables are int32; block 0 is null: ``source`` and ``indexer`` ``[rows, pages]``,
    ``resident`` ``[groups, rows, pages]``, ``hot`` ``[groups, rows, hot_blocks]``.
    """

    SOURCE_GROUP = 0
    INDEXER_GROUP = 1

    def __init__(self, rows: int, pages: int, groups: int, hot_blocks: int) -> None:
        self.groups = groups
        self.source = torch.zeros((rows, pages), dtype=torch.int32)
        self.indexer = torch.zeros((rows, pages), dtype=torch.int32)
        self.resident = torch.zeros((groups, rows, pages), dtype=torch.int32)
        self.hot = torch.zeros((groups, rows, hot_blocks), dtype=torch.int32)
        self.requests: dict[str, RequestState] = {}
        self._free_rows = list(range(rows - 1, -1, -1))
        self._lengths = [[0, 0] for _ in range(rows)]

    def add(self, new: Any) -> RequestState:
        """Start, or restart after preemption, the request of a ``NewRequestData``."""
        self.remove([new.req_id])
        if not self._free_rows:
            raise RuntimeError(f"no state row for request {new.req_id}: more than max_num_seqs run")
        row = self._free_rows.pop()
        tokens = list(new.prefill_token_ids or new.prompt_token_ids)
        state = RequestState(
            row=row,
            tokens=tokens,
            params=new.sampling_params,
            prompt_len=len(new.prompt_token_ids),
            known=len(tokens),
            hot_blocks=[[] for _ in range(self.groups)],
        )
        self.source[row].zero_()
        self.indexer[row].zero_()
        self.resident[:, row].zero_()
        self.hot[:, row].zero_()
        self._lengths[row] = [0, 0]
        self.requests[new.req_id] = state
        self.append_blocks(state, new.block_ids)
        return state

    def append_blocks(self, state: RequestState, block_ids: Sequence[Sequence[int]]) -> bool:
        """Append new block ids of every cache group; true when hot blocks came."""
        for position, table in enumerate((self.source, self.indexer)):
            ids = block_ids[position]
            if ids:
                start = self._lengths[state.row][position]
                table[state.row, start : start + len(ids)] = torch.tensor(ids, dtype=torch.int32)
                self._lengths[state.row][position] = start + len(ids)
        grown = False
        first_hot = 2 + self.groups
        for group in range(self.groups):
            ids = block_ids[first_hot + group]
            if ids:
                blocks = state.hot_blocks[group]
                start = len(blocks)
                blocks.extend(ids)
                self.hot[group, state.row, start : len(blocks)] = torch.tensor(
                    ids, dtype=torch.int32
                )
                grown = True
        return grown

    def update_residency(self, request_id: str, pages: list[int], ids: Sequence[list[int]]) -> None:
        """Set the resident block of ``pages`` in each group; 0 means read from the host."""
        row = self.requests[request_id].row
        index = torch.tensor(pages, dtype=torch.int64)
        for group, blocks in enumerate(ids):
            self.resident[group, row, index] = torch.tensor(blocks, dtype=torch.int32)

    def remove(self, request_ids: Iterable[str]) -> None:
        """Forget requests; unknown ids are ignored (finished before they were scheduled)."""
        for request_id in request_ids:
            state = self.requests.pop(request_id, None)
            if state is not None:
                self._free_rows.append(state.row)


@dataclass(frozen=True)
class ScheduledTokens:
    """Tokens ``[start, start + count)`` of one request in this step, drafts last."""

    request_id: str
    row: int
    start: int
    count: int
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def known_end(self) -> int:
        """End of the tokens that are certain."""
        return self.end - len(self.drafts)

    @property
    def decodes(self) -> bool:
        """One certain token; more at a time is prefill."""
        return self.count == 1 + len(self.drafts)
