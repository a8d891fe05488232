"""Offloaded indexer chunks: byte-equal after a round trip through lent host blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from hisparsed.engine.reference.model_folder import (
    INDEX_ROW_BYTES,
    ROW_BYTES,
    ReferenceGeometry,
    indexer_layer_name,
    kv_layer_name,
)
from hisparsed.engine.reference.store import KVStore

BLOCK = 16
GEOMETRY = ReferenceGeometry(
    layers=8,
    index_groups=2,
    hidden=16,
    heads=1,
    intermediate=16,
    vocab=8,
    index_topk=4,
    index_heads=1,
    max_model_len=64,
    seed=0,
)
SLAB_BLOCKS, HOST_BLOCKS = 24, 12
PAGE = BLOCK * ROW_BYTES
BLOCK_BYTES = 4 * PAGE


@dataclass
class Tensor:
    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0
    host_resident: bool = False


@dataclass
class Config:
    num_blocks: int = SLAB_BLOCKS
    hisparse_host_num_blocks: int = HOST_BLOCKS
    kv_cache_tensors: list[Tensor] = field(default_factory=list)


@dataclass
class Blocks:
    block_ids: np.ndarray


def spec(ids: list[int]) -> Blocks:
    return Blocks(np.array(ids, dtype=np.int32))


def make_store() -> KVStore:
    """A store laid out as vLLM lays out the reference node, without vLLM's planning."""
    slab = BLOCK_BYTES * SLAB_BLOCKS
    names = [kv_layer_name(layer) for layer in range(GEOMETRY.layers)]
    tensors = [Tensor(HOST_BLOCKS * 8 * PAGE, names, 0, 0, host_resident=True)]
    leaders = [indexer_layer_name(GEOMETRY.group_layers(group)[0]) for group in range(2)]
    tensors.append(Tensor(slab, leaders, BLOCK * INDEX_ROW_BYTES, BLOCK_BYTES))
    for kind in ("resident", "hot"):
        for group in range(2):
            layers = [f"{kv_layer_name(n)}.hisparse_{kind}" for n in GEOMETRY.group_layers(group)]
            tensors.append(Tensor(slab, layers, PAGE, BLOCK_BYTES))
    return KVStore(Config(kv_cache_tensors=tensors), GEOMETRY, BLOCK)


@pytest.fixture
def store() -> KVStore:
    torch.manual_seed(0)
    made = make_store()
    made.slab.random_(-128, 127)
    made.host.random_(-128, 127)
    return made


def pages(store: KVStore, blocks: list[int]) -> torch.Tensor:
    return torch.cat([view[blocks].flatten(1) for view in store.index_rows], dim=1).clone()


def test_chunks_come_back_byte_equal_into_other_slab_blocks(store: KVStore) -> None:
    from hisparsed.engine.reference.connectors import LentChunkWorker, reference_chunk_layout

    layout = reference_chunk_layout(store)
    worker = LentChunkWorker(store, layout)
    sources, targets = [3, 7, 1, 9, 5, 2, 8, 4, 6], [20, 11, 15, 12, 19, 13, 22, 14, 10]
    chunks = [*layout.chunk_ids(2), *list(layout.chunk_ids(10))[3:5]]
    before = pages(store, sources)
    assert worker.submit_store(1, spec(sources), spec(chunks))
    store.slab.random_(-128, 127)
    assert worker.submit_load(2, spec(chunks), spec(targets))
    assert torch.equal(pages(store, targets), before)
    assert [(done.job_id, done.transfer_size) for done in worker.get_finished()] == [
        (1, before.numel()),
        (2, before.numel()),
    ]
    assert worker.get_finished() == []


def test_a_store_touches_only_its_slots(store: KVStore) -> None:
    from hisparsed.engine.reference.connectors import LentChunkWorker, reference_chunk_layout

    layout = reference_chunk_layout(store)
    worker = LentChunkWorker(store, layout)
    chunk = list(layout.chunk_ids(4))[2]
    before = store.host.clone()
    worker.submit_store(1, spec([5]), spec([chunk]))
    changed = (store.host != before).nonzero().squeeze(1)
    allowed = torch.zeros_like(store.host, dtype=torch.bool)
    for piece in layout.pieces(2):
        start = piece.layer * HOST_BLOCKS * PAGE + 4 * PAGE + piece.slice_offset
        allowed[start : start + piece.length] = True
    assert len(changed) > 0
    assert bool(allowed[changed].all())
    assert int(allowed.sum()) == layout.chunk_bytes
