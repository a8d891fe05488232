"""Prefix look-ups of waiting calls, remembered between passes: the same answers in less time.

vLLM asks for the whole prefix of the head of its queue again in every pass, block by block.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from hisparsed.engine.remembered import RememberedPrefix

_CALLS = 64


class RememberedLookups:
    """In the place of one full-attention group's manager class, of which vLLM's coordinator asks
    the longest cached prefix and nothing else."""

    def __init__(self, manager_cls: Any) -> None:
        self._manager_cls = manager_cls
        self.supports_fine_grained_hash_lookup = manager_cls.supports_fine_grained_hash_lookup
        # By the address of a call's list of hashes, which the prefix keeps: no other gets it.
        self._found: OrderedDict[int, RememberedPrefix] = OrderedDict()

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
        known = self._found.pop(id(hashes), None) or RememberedPrefix(hashes, group)
        self._found[id(hashes)] = known
        if len(self._found) > _CALLS:
            self._found.popitem(last=False)
        return known.walk(pool.cached_block_hash_to_block, most)


def remember_lookups(coordinator: Any) -> None:
    """Let a hybrid coordinator's full-attention groups remember."""
    own = FullAttentionManager.find_longest_cache_hit.__func__
    coordinator.attention_groups = [
        group._replace(manager_cls=RememberedLookups(group.manager_cls))
        if getattr(group.manager_cls.find_longest_cache_hit, "__func__", None) is own
        else group
        for group in coordinator.attention_groups
    ]
