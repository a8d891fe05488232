"""Chunk packing: every byte once, inside one slice, in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparsed.engine.host.chunks import ChunkLayout

layouts = st.builds(
    lambda layers, slice_bytes, share: ChunkLayout(
        layers, slice_bytes, max(1, min(layers * slice_bytes, share))
    ),
    st.integers(1, 80),
    st.integers(1, 700),
    st.integers(1, 5000),
)


@given(layouts, st.integers(0, 10_000))
def test_pieces_cover_a_chunk_exactly_once(layout: ChunkLayout, pick: int) -> None:
    slot = pick % layout.chunks_per_block
    pieces = layout.pieces(slot)
    assert [piece.chunk_offset for piece in pieces] == [
        sum(piece.length for piece in pieces[:index]) for index in range(len(pieces))
    ]
    assert sum(piece.length for piece in pieces) == layout.chunk_bytes
    for piece in pieces:
        assert piece.length > 0
        assert 0 <= piece.layer < layout.layers
        assert piece.slice_offset + piece.length <= layout.slice_bytes


@given(layouts.filter(lambda layout: layout.block_bytes < 20_000))
def test_chunks_of_a_block_do_not_overlap(layout: ChunkLayout) -> None:
    used: set[tuple[int, int]] = set()
    for slot in range(layout.chunks_per_block):
        for piece in layout.pieces(slot):
            for byte in range(piece.slice_offset, piece.slice_offset + piece.length):
                assert (piece.layer, byte) not in used
                used.add((piece.layer, byte))
    assert len(used) + layout.padding_bytes == layout.block_bytes


@given(layouts, st.integers(0, 100_000))
def test_ids_round_trip(layout: ChunkLayout, block: int) -> None:
    for slot, chunk_id in enumerate(layout.chunk_ids(block)):
        assert layout.locate(chunk_id) == (block, slot)


def test_glm_geometry() -> None:
    layout = ChunkLayout(layers=78, slice_bytes=64 * 656, chunk_bytes=21 * 132 * 64)
    assert layout.chunks_per_block == 18
    assert len(layout.pieces(0)) == 5


def test_a_chunk_larger_than_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit a host block of 100 B"):
        ChunkLayout(layers=1, slice_bytes=100, chunk_bytes=101)


def test_a_slot_outside_the_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"slot 3 is not in 0\.\.1"):
        ChunkLayout(layers=1, slice_bytes=100, chunk_bytes=50).pieces(3)
