"""The cached prefix of one call in one of vLLM's block tables, remembered between look-ups.

What was found before is checked, not looked up, and the walk goes on where it ended: the same
answer as asking block by block, in a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

_hash_of = attrgetter("block_hash")


class RememberedPrefix:
    """``hashes`` of the call, a list that only grows; ``group`` is the cache group looked in."""

    def __init__(self, hashes: Sequence[Any], group: int) -> None:
        self.hashes = hashes
        self._group = group
        self._keys: list[Any] = []
        self._blocks: list[Any] = []

    def walk(self, table: Any, most: int) -> list[Any]:
        """vLLM's blocks of the longest cached prefix of at most ``most`` blocks."""
        keys, blocks = self._keys, self._blocks
        now = list(map(_hash_of, blocks))
        if now != keys:
            kept = next(index for index, key in enumerate(keys) if now[index] != key)
            del keys[kept:], blocks[kept:]
        for block_hash in self.hashes[len(blocks) : most]:
            key = make_block_hash_with_group_id(block_hash, self._group)
            block = table.get_one_block(key)
            if block is None:
                break
            keys.append(key)
            blocks.append(block)
        return blocks[:most]
