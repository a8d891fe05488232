"""Prefix look-ups of waiting calls, remembered between passes: the same answers in less time.

vLLM asks for the whole prefix of the head of its queue again in every pass, block by block. Here
what was found before is checked, not looked up, and the walk goes on where it ended.
"""

from __future__ import annotations

from collections import OrderedDict
from operator import attrgetter, ne
from typing import Any

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

_CALLS = 64
_hash_of = attrgetter("block_hash")


class RememberedLookups:
    """In the place of one full-attention group's manager class, of which vLLM's coordinator asks
    the longest cached prefix and nothing else."""

    def __init__(self, manager_cls: Any) -> None:
        self._manager_cls = manager_cls
        self.supports_fine_grained_hash_lookup = manager_cls.supports_fine_grained_hash_lookup
        # By the address of a call's list of hashes, which is kept so that no other gets it.
        self._found: OrderedDict[int, tuple[list[bytes], list[bytes], list[Any]]] = OrderedDict()

    def find_longest_cache_hit(
        self,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: Any,
        drop_eagle_block: bool,
        alignment_tokens: int,
        **rest: Any,
    ) -> tuple[tuple[list[Any], ...], int]:
        size = int(kv_cache_spec.block_size)
        whole = size == block_pool.hash_block_size == alignment_tokens and not drop_eagle_block
        if len(kv_cache_group_ids) != 1 or not whole or not isinstance(block_hashes, list):
            found: tuple[tuple[list[Any], ...], int] = self._manager_cls.find_longest_cache_hit(
                block_hashes,
                max_length,
                kv_cache_group_ids,
                block_pool,
                kv_cache_spec,
                drop_eagle_block,
                alignment_tokens,
                **rest,
            )
            return found
        blocks = self._blocks(block_hashes, max_length // size, kv_cache_group_ids[0], block_pool)
        return (blocks,), len(blocks) * size

    def _blocks(self, hashes: list[bytes], most: int, group: int, pool: Any) -> list[Any]:
        _, keys, blocks = self._found.pop(id(hashes), (hashes, [], []))
        lost = map(ne, keys, map(_hash_of, blocks))
        kept = next((index for index, gone in enumerate(lost) if gone), len(blocks))
        del keys[kept:], blocks[kept:]
        table = pool.cached_block_hash_to_block
        for block_hash in hashes[len(blocks) : most]:
            key = make_block_hash_with_group_id(block_hash, group)
            block = table.get_one_block(key)
            if block is None:
                break
            keys.append(key)
            blocks.append(block)
        self._found[id(hashes)] = (hashes, keys, blocks)
        if len(self._found) > _CALLS:
            self._found.popitem(last=False)
        return blocks[:most]


def remember_lookups(coordinator: Any) -> None:
    """Let a hybrid coordinator's full-attention groups remember."""
    own = FullAttentionManager.find_longest_cache_hit.__func__
    coordinator.attention_groups = [
        group._replace(manager_cls=RememberedLookups(group.manager_cls))
        if getattr(group.manager_cls.find_longest_cache_hit, "__func__", None) is own
        else group
        for group in coordinator.attention_groups
    ]
