"""Writes the table of the worker's side into docs/cuda.md, from what stand-in nodes called.

``STANDIN_CALLS=DIR`` keeps what the tests of one vLLM version called, then
``python tests/standin/worker_table.py 0.32=DIR 0.33=DIR`` writes the table.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "cuda.md"
BEGIN, END = "<!-- worker table: begin -->\n", "<!-- worker table: end -->\n"
PARTS = {
    "worker and model runner": ("vllm/v1/worker/gpu_worker.py", "vllm/v1/worker/gpu/"),
    "KV cache: planning, allocation, binding": (
        "vllm/v1/hisparse/layout.py",
        "vllm/v1/hisparse/binding.py",
        "vllm/v1/worker/utils.py",
        "vllm/v1/kv_cache_interface.py",
    ),
    "HiSparse data plane": (
        "vllm/v1/hisparse/runtime.py",
        "vllm/distributed/kv_transfer/kv_connector/v1/hisparse/",
    ),
    "connectors and offloading": (
        "vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py",
        "vllm/distributed/kv_transfer/kv_connector/v1/offloading",
        "vllm/distributed/kv_transfer/kv_transfer_state.py",
        "vllm/v1/kv_offload/",
        "vllm/v1/simple_kv_offload/",
    ),
    "prefix from another node": (
        "vllm/distributed/kv_transfer/kv_connector/v1/nixl/",
        "vllm/distributed/kv_transfer/kv_connector/utils.py",
    ),
    "attention and indexer": (
        "vllm/v1/attention/backends/mla/",
        "vllm/model_executor/layers/attention/",
        "vllm/model_executor/layers/sparse_attn_indexer.py",
    ),
    "model": ("vllm/models/deepseek_v32/",),
    "hisparsed": ("hisparsed/engine/cuda/",),
}
"""Parts of a CUDA worker, each by the files that it is in."""
STOOD_IN = {
    "worker and model runner": (
        "`MemorySnapshot`'s figures, `kernel_warmup`, streams and events; Triton kernels "
        "interpreted, `_gather_block_tables_kernel` and `_compute_slot_mappings_kernel` in numpy"
    ),
    "KV cache: planning, allocation, binding": "`cudaHostRegister`, which notes the range",
    "HiSparse data plane": (
        "`hisparse_resolve_residency`, `hisparse_gather_compact`, `hisparse_gather_plan`, "
        "`hisparse_invalidate_written_slots`, `swap_blocks_batch`, IPC events"
    ),
    "connectors and offloading": "`swap_blocks_batch`, `cudaHostUnregister`",
    "prefix from another node": "NIXL's agent, which lets the kernel copy between processes",
    "attention and indexer": (
        "`flash_mla_sparse_fwd`, `flash_mla_with_kvcache`, `concat_and_cache_mla`, "
        "`concat_mla_q`, `cp_gather_and_upconvert_fp8_kv_cache`, "
        "`cp_gather_indexer_k_quant_cache`, DeepGEMM's logits, top-k, the index remap"
    ),
    "model": "`fused_norm_rope`, `fused_q`, `fused_embed_norm`, vocabulary lookup, products",
    "hisparsed": "resolver and gather by the C++ backend instead of Triton's",
}
ONLY_A_CARD = {
    "worker and model runner": "CUDA graphs, memory profiling, NCCL, warm-up",
    "KV cache: planning, allocation, binding": "pinning",
    "HiSparse data plane": "order between streams and between ranks' events, PCIe",
    "connectors and offloading": "asynchronous copies, several registrations",
    "prefix from another node": "UCX, reads from GPU to GPU, several machines",
    "attention and indexer": "the kernels",
    "model": "the kernels, FP8 weights, experts",
    "hisparsed": "Triton kernels compiled, copy stream and events",
}


def called(folder: Path) -> dict[str, set[str]]:
    """By part: classes and functions of its files that ran in a worker."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in folder.glob("*.json"):
        for line in json.loads(path.read_text()).get("calls", ()):
            file, _, name = line.rpartition(":")
            part = next(
                (
                    part
                    for part, places in PARTS.items()
                    if any(f"/{place}" in file for place in places)
                ),
                None,
            )
            outer, last = name.split(".")[0], name.split(".")[-1]
            # A capital at the end is a class's body, which ran when its module was imported.
            if part is None or last[:1].isupper():
                continue
            if outer.isidentifier() and not outer.startswith("_"):
                found[part].add(outer)
    return found


def table(folders: Mapping[str, Path]) -> str:
    """``folders``: by version. What one version alone called is marked with it."""
    lines = [
        "| part | ran here | ran on a stand-in | only a card can run it |",
        "|---|---|---|---|",
    ]
    found = {version: called(folder) for version, folder in folders.items()}
    for part in PARTS:
        versions: dict[str, list[str]] = defaultdict(list)
        for version, parts in found.items():
            for name in parts[part]:
                versions[name].append(version)
        names = ", ".join(
            f"`{name}`" if len(versions[name]) == len(found) else f"`{name}` ({versions[name][0]})"
            for name in sorted(versions, key=str.lower)
        )
        lines.append(f"| {part} | {names} | {STOOD_IN[part]} | {ONLY_A_CARD[part]} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    folders = {version: Path(at) for version, _, at in (one.partition("=") for one in sys.argv[1:])}
    before, _, rest = DOCS.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCS.write_text(f"{before}{BEGIN}{table(folders)}{END}{after}")


if __name__ == "__main__":
    main()
