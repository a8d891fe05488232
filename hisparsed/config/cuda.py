"""The CUDA node's part of the node's document: GPUs, KV on them, hot buffers, drafts, kernels.

What vLLM calls an engine argument and is not here goes into `engine_args`. Reads and checks one
section; what the machine and the model allow is checked at start.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from hisparsed.policy.units import Fraction

Count = Annotated[int, Field(ge=1, strict=True)]


class CudaConfig(BaseModel):
    """Counts, and tokens or rows where the name says so; ``None`` leaves a value to vLLM."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor_parallel_size: Count = 1
    """GPUs that share the model; all on this machine."""
    max_model_len: Count | None = None
    """Tokens of prompt and answer together; ``None`` is what the model's config says."""
    max_num_seqs: Count | None = None
    """Requests running at once."""
    max_num_batched_tokens: Count | None = None
    """Tokens computed in one engine step."""
    gpu_memory_utilization: Annotated[Fraction, Field(gt=0)] | None = None
    """Share of each GPU's memory that the engine may take."""
    kv_cache_dtype: Literal["fp8_ds_mla", "bfloat16"] = "fp8_ds_mla"
    """How a sparse-MLA row is kept: 656 bytes a layer in FP8, 1152 in bfloat16."""
    hot_rows: Count | None = None
    """Rows of a hot buffer; ``None`` leaves it to the policy.

    vLLM's kernels know one size, from start to end: the policy's `hot.start`. With `kernels:
    hisparsed` this is the largest lease: the policy's `hot.max`."""
    hot_scratch: bool = False
    """Keep GPU blocks aside for rows of drafts that do not fit a hot buffer, so that one may be as
    small as one top-k. Takes drafts x top-k rows for each of `max_num_seqs`; with `kernels:
    hisparsed` only."""
    eager_host_mirror: bool = True
    """Copy decode rows to the host as they are written, not when their page leaves the GPU."""
    speculative_tokens: Annotated[int, Field(ge=0, le=16, strict=True)] = 0
    """Drafts of the model's own MTP layer that are verified with each token."""
    kernels: Literal["vllm", "hisparsed"] = "vllm"
    """Who finds rows in hot buffers. `hisparsed` sizes buffers request by request, live."""
