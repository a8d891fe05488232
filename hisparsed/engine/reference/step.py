"""The KV of one engine step: writes, top-k selection, and reads in every residency state.

Decode rows go through the residency resolver (resident, hot, host). Prefill chunks stage
their whole context, from the slab where a page is resident and from the host where it is
not, as vLLM's prefill staging does. Holds no state beyond the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hisparsed.engine.reference.hot import Located, ReferenceHotBuffers
from hisparsed.engine.reference.model import index_scores
from hisparsed.engine.reference.model_folder import INDEX_DIM, ROW_BYTES, ReferenceGeometry
from hisparsed.engine.reference.requests import RequestTables, ScheduledTokens
from hisparsed.engine.reference.store import KVStore

_POSITION_BITS = 20
"""Top-k keys are (score, earlier position first) in one int64: no ties, one answer."""


def top_positions(scores: torch.Tensor, lengths: torch.Tensor, topk: int) -> torch.Tensor:
    """The ``topk`` best positions of each row, ascending, -1 padded: int32 ``[T, topk]``.

    ``scores`` float32 ``[T, N]``, non-negative; ``lengths`` int64 ``[T]``: positions at or
    beyond a row's length are not candidates.
    """
    width = scores.shape[1]
    position = torch.arange(width, dtype=torch.int64)
    bits = scores.contiguous().view(torch.int32).to(torch.int64)
    keys = (bits << _POSITION_BITS) | (width - 1 - position)
    candidate = position.unsqueeze(0) < lengths.unsqueeze(1)
    keys = torch.where(candidate, keys, -1)
    best, chosen = keys.topk(min(topk, width), dim=1, sorted=False)
    chosen = torch.where(best >= 0, chosen, width)
    chosen = chosen.sort(dim=1).values
    chosen = torch.where(chosen < width, chosen, -1)
    if width < topk:
        chosen = torch.nn.functional.pad(chosen, (0, topk - width), value=-1)
    return chosen.to(torch.int32)


class StepKV:
    """``KVAccess`` of one batch: decode segments first, then prefill."""

    def __init__(
        self,
        geometry: ReferenceGeometry,
        store: KVStore,
        tables: RequestTables,
        hot: ReferenceHotBuffers,
        segments: Sequence[ScheduledTokens],
    ) -> None:
        """``segments``: those that decode come first."""
        self.geometry = geometry
        self.store = store
        self.tables = tables
        self.hot = hot
        decodes = [segment for segment in segments if segment.decodes]
        self.prefills = segments[len(decodes) :]
        self._decode_count = sum(segment.count for segment in decodes)
        self._batch = hot.batch(decodes)
        self.positions = torch.cat([torch.arange(s.start, s.end) for s in segments])
        self._token_rows = torch.cat(
            [torch.full((s.count,), s.row, dtype=torch.int64) for s in segments]
        )
        block_size = store.block_size
        self._pages = self.positions // block_size
        self._offsets = self.positions % block_size
        self._write_blocks = [
            self._blocks_of(tables.resident[group], group) for group in range(geometry.index_groups)
        ]
        self._index_blocks = tables.indexer[self._token_rows, self._pages].long()
        if bool((self._index_blocks <= 0).any()):
            raise RuntimeError("a scheduled token has no indexer block")
        self._decode_rows = self._token_rows[: self._decode_count]
        self._decode_lengths = self.positions[: self._decode_count] + 1
        self._decode_index: torch.Tensor | None = None
        self._decode_located: Located | None = None
        self._prefill_chosen: list[torch.Tensor] = []

    def _blocks_of(self, table: torch.Tensor, group: int) -> torch.Tensor:
        blocks = table[self._token_rows, self._pages].long()
        if bool((blocks <= 0).any()):
            raise RuntimeError(f"a scheduled token of group {group} has no resident page")
        return blocks

    def write_rows(self, layer: int, rows: torch.Tensor) -> None:
        group = layer // self.geometry.layers_per_group
        slots = self.store.slab_rows_of(layer, self._write_blocks[group], self._offsets)
        self.store.rows.index_copy_(0, slots, rows)

    def write_index_rows(self, group: int, keys: torch.Tensor, scales: torch.Tensor) -> None:
        packed = torch.cat((keys, scales.unsqueeze(1).view(torch.int8)), dim=1)
        self.store.index_rows[group][self._index_blocks, self._offsets] = packed

    def select(self, group: int, query: torch.Tensor, head_weight: torch.Tensor) -> None:
        decodes = self._decode_count
        self._prefill_chosen = []
        if decodes:
            chosen = self._select_decodes(group, query[:decodes], head_weight[:decodes])
            self._decode_located = self.hot.locate(group, chosen, self._batch)
        token = decodes
        for segment in self.prefills:
            span = slice(token, token + segment.count)
            keys, scales = self._index_context(group, segment)
            scores = index_scores(query[span], head_weight[span], keys) * scales.unsqueeze(0)
            lengths = torch.arange(segment.start + 1, segment.end + 1)
            self._prefill_chosen.append(top_positions(scores, lengths, self.geometry.index_topk))
            token += segment.count

    def _select_decodes(
        self, group: int, query: torch.Tensor, head_weight: torch.Tensor
    ) -> torch.Tensor:
        blocks = self._decode_index_blocks()
        packed = self.store.index_rows[group][blocks].flatten(1, 2)
        keys = packed[..., :INDEX_DIM].float()
        scales = packed[..., INDEX_DIM:].contiguous().view(torch.float32).squeeze(-1)
        scores = index_scores(query, head_weight, keys) * scales
        # Null pages pad shorter requests: their bytes are never candidates, but must not
        # be NaN, which would poison the integer keys.
        scores = torch.nan_to_num(scores, nan=0.0, posinf=0.0, neginf=0.0).clamp(min=0.0)
        return top_positions(scores, self._decode_lengths, self.geometry.index_topk)

    def _decode_index_blocks(self) -> torch.Tensor:
        if self._decode_index is None:
            pages = -(-int(self._decode_lengths.max()) // self.store.block_size)
            self._decode_index = self.tables.indexer[self._decode_rows, :pages].long()
        return self._decode_index

    def _index_context(
        self, group: int, segment: ScheduledTokens
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pages = -(-segment.end // self.store.block_size)
        blocks = self.tables.indexer[segment.row, :pages].long()
        packed = self.store.index_rows[group][blocks].flatten(0, 1)[: segment.end]
        scales = packed[:, INDEX_DIM:].contiguous().view(torch.float32).squeeze(-1)
        return packed[:, :INDEX_DIM].float(), scales

    def read_rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        if self._decode_located is not None:
            located = self._decode_located
            parts.append((self.hot.read(layer, located), located.valid))
        for segment, chosen in zip(self.prefills, self._prefill_chosen, strict=True):
            staged = self._stage(layer, segment)
            parts.append((staged[chosen.clamp(min=0).long()], chosen >= 0))
        if len(parts) == 1:
            return parts[0]
        return torch.cat([rows for rows, _ in parts]), torch.cat([valid for _, valid in parts])

    def _stage(self, layer: int, segment: ScheduledTokens) -> torch.Tensor:
        """All context rows of a prefill segment, int8 ``[end, ROW_BYTES]``."""
        group = layer // self.geometry.layers_per_group
        block_size = self.store.block_size
        pages = -(-segment.end // block_size)
        resident = self.tables.resident[group, segment.row, :pages].long()
        offsets = torch.arange(block_size)
        slots = resident.unsqueeze(1) * self.store.block_rows + offsets
        staged = self.store.rows[slots.view(-1) + self.store.layer_base[layer]]
        on_host = (resident <= 0).nonzero().squeeze(1)
        if on_host.numel():
            source = self.tables.source[segment.row, on_host].long()
            if bool((source <= 0).any()):
                raise RuntimeError(
                    f"{segment.request_id}: a page is neither resident nor on the host"
                )
            host = (source.unsqueeze(1) * block_size + offsets).view(-1)
            target = (on_host.unsqueeze(1) * block_size + offsets).view(-1)
            staged[target] = self.store.host_rows[layer][host]
        return staged[: segment.end].view(-1, ROW_BYTES)
