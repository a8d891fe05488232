"""vLLM names of the proof process: its runtimes over scratch memory, one copy each way."""

from __future__ import annotations

from tests.contract.touch import Touch, calls, fields, only, reads, sets, texts

_WORKER = ("engine.cuda.proof.worker",)
_CHUNKS = ("engine.cuda.proof.chunks",)
_UNPROVED = "our kernels are not proved and vLLM's are used; the status says why"
_NO_LENDING = "copies are not proved, and nothing is lent to the offload pool"
_FEATURES = "engine.compat.features"

TOUCHED = (
    Touch(
        "vllm.platforms",
        by=("engine.cuda.proof.__main__",),
        why="the platform whose operators are loaded",
        breaks=_UNPROVED,
        uses=texts("current_platform"),
    ),
    Touch(
        "vllm.platforms.interface:Platform",
        by=("engine.cuda.proof.__main__",),
        why="loads vLLM's operators for the device",
        breaks=_UNPROVED,
        uses=calls("import_kernels"),
    ),
    Touch(
        "vllm.v1.hisparse.runtime:ResolvedHiSparseConfig",
        by=_WORKER,
        why="sizes of the runtimes that a proof makes",
        breaks=_UNPROVED,
        uses=(
            *fields("top_k", "device_buffer_size"),
            *only(fields("max_union_rows"), _FEATURES, since="0.31"),
        ),
    ),
    Touch(
        "vllm.v1.hisparse.runtime:HiSparseRuntime",
        by=_WORKER,
        why="vLLM's side of a proof, and what our resolver is put behind",
        breaks=_UNPROVED,
        uses=(
            *calls(
                "",
                0,
                "config",
                "max_num_reqs",
                "row_width",
                "kv_dtype",
                "device",
                "max_swap_rows",
                "index_group",
            ),
            *calls(
                "bind_hot_cache",
                1,
                "byte_offset",
                "block_stride",
                "num_blocks",
                "block_size",
                "block_table",
            ),
            *calls("bind_source_cache", 1, "registered_host_pool"),
            *calls("begin_forward"),
            *calls("invalidate_written_slots", 2),
            *sets("request_state_indices"),
            *reads("index_group", "is_group_leader", "hot"),
        ),
    ),
    Touch(
        "vllm.v1.hisparse.runtime:HiSparseCacheHandle",
        by=_WORKER,
        why="one layer of a step, as attention asks for it",
        breaks=_UNPROVED,
        uses=(
            *calls("", 1),
            *calls(
                "bind_cache",
                1,
                "byte_offset",
                "block_stride",
                "num_blocks",
                "block_size",
                "block_table",
                "slot_mapping",
            ),
            *only(
                calls("swap_in", 3, "block_size", "num_valid_rows", "return_valid_counts"),
                _FEATURES,
                since="0.31",
            ),
            *sets("source_block_table", "decode_batch"),
            *only(sets("residency"), "engine.compat.adapters", since="0.32"),
        ),
    ),
    Touch(
        "vllm.v1.hisparse.runtime:PagedCacheView",
        by=_WORKER,
        why="the memory that attention reads rows from",
        breaks=_UNPROVED,
        uses=reads("attention_cache"),
    ),
    Touch(
        "vllm.v1.simple_kv_offload.cuda_mem_ops:pin_tensor",
        by=_CHUNKS,
        why="pins the few host blocks of a proof",
        breaks=_NO_LENDING,
        uses=calls("", 1),
    ),
    Touch(
        "vllm.v1.kv_offload.base:GPULoadStoreSpec",
        by=_CHUNKS,
        why="names the GPU blocks of a copy",
        breaks=_NO_LENDING,
        uses=calls("", 1, "group_sizes", "block_indices"),
    ),
    Touch(
        "vllm.v1.kv_offload.cpu.common:CPULoadStoreSpec",
        by=_CHUNKS,
        why="names the chunks of a copy",
        breaks=_NO_LENDING,
        uses=calls("", 1),
    ),
)
