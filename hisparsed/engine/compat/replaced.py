"""Whether vLLM's methods that ``engine.pages`` replaces are those that it was written against.

It replaces whole methods, so an unchanged signature is not enough. Their text is compared with that
of the versions it was tested with; with any other text vLLM's own methods stay in force.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

REPLACED: dict[str, tuple[str, ...]] = {
    "vllm.v1.hisparse.coordinator": ("HiSparseCoordinator", "_PendingSpill"),
    "vllm.v1.core.single_type_kv_cache_manager": (
        "HiSparseResidentManager",
        "HiSparseHotManager",
        "_HiSparseAuxiliaryManager",
        "SingleTypeKVCacheManager.remove_skipped_blocks",
        "SingleTypeKVCacheManager.new_step_starts",
    ),
    "vllm.v1.core.block_pool": tuple(
        f"BlockPool.{name}"
        for name in ("get_new_blocks", "_notify_reuse", "unpin_blocks", "touch", "free_blocks")
    ),
    "vllm.v1.core.kv_cache_coordinator": tuple(
        f"KVCacheCoordinator.{name}"
        for name in (
            "get_num_blocks_to_allocate",
            "allocate_new_blocks",
            "cache_blocks",
            "remove_skipped_blocks",
            "new_step_starts",
        )
    ),
    "vllm.v1.core.kv_cache_manager": (
        "KVCacheBlocks.get_block_ids",
        "KVCacheManager.create_kv_cache_blocks",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler": (
        "OffloadingConnectorScheduler._maximal_prefix_lookup",
    ),
    "vllm.v1.kv_offload.cpu.manager": ("CPUOffloadingManager.lookup",),
}

KNOWN = {
    "68fcdbf167b9415a": "0.32",
    "e76168f88ec6011b": "0.33",
}
"""Digest of all of it, and the first version with that text."""


def module_text(name: str) -> str:
    """The source of an installed module, which is not imported for it."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return ""
    return Path(spec.origin).read_text("utf-8")


def replaced_digest(text_of: Callable[[str], str] = module_text) -> str | None:
    """Of all replaced methods, ignoring white space; ``None`` if one of them does not exist."""
    digest = hashlib.sha256()
    for module, names in REPLACED.items():
        text = text_of(module)
        found = _parts(text)
        for name in names:
            if name not in found:
                return None
            digest.update("".join(found[name].split()).encode())
    return digest.hexdigest()[:16]


def pages_can_be_whole() -> bool:
    """Whether ``engine.pages`` matches the installed vLLM."""
    return replaced_digest() in KNOWN


def _parts(text: str) -> dict[str, str]:
    """The text of classes and their methods, by dotted name."""
    lines = text.splitlines()
    found: dict[str, str] = {}
    for node in ast.parse(text).body:
        if not isinstance(node, ast.ClassDef):
            continue
        found[node.name] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        for one in node.body:
            if isinstance(one, ast.FunctionDef):
                found[f"{node.name}.{one.name}"] = "\n".join(lines[one.lineno - 1 : one.end_lineno])
    return found
