"""The reference node's small model and slab: sizes that make a CPU show what a GPU node does.

Only the reference node reads this; a CUDA node takes its geometry from the model it loads.
"""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hisparsed.policy.document import refuse

Count = Annotated[int, Field(ge=1, strict=True)]


class ReferenceConfig(BaseModel):
    """A sparse-MLA model with fixed random weights; counts, and tokens where the name says so."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: Count = 8
    index_groups: Count = 2
    index_topk: Count = 64
    """Tokens the indexer picks for each query."""
    block_size: Count = 16
    """Tokens in a KV block, on the GPU and in the host pool."""
    gpu_blocks: Count = 2048
    """Blocks of the slab that stands for GPU memory."""
    max_model_len: Count = 4096
    """Tokens of prompt and answer together."""
    max_num_seqs: Count = 8
    max_num_batched_tokens: Count = 512
    """Tokens computed in one engine step."""
    speculative_tokens: Annotated[int, Field(ge=0, le=16, strict=True)] = 0
    """Drafts that are verified with each token; 0 decodes one by one."""
    ack_lag_steps: Annotated[int, Field(ge=0, le=64, strict=True)] = 1
    """Engine steps that a page transfer takes, as a DMA engine's would."""
    eager_host_mirror: bool = True
    """Copy decode rows to the host as they are written, not when their page is full."""
    threads: Count = 1
    """CPU threads that the model computes with."""
    seed: Annotated[int, Field(ge=0, strict=True)] = 0

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.layers % self.index_groups:
            raise refuse(
                "index_groups",
                f"{self.index_groups} groups do not divide {self.layers} layers evenly",
                hint="each index group shares one indexer among the same number of layers",
                key=("index_groups",),
            )
        if self.max_model_len % self.block_size:
            raise refuse(
                "max_model_len",
                f"{self.max_model_len} tokens are not whole blocks of {self.block_size}",
                hint=f"write {self.max_model_len // self.block_size * self.block_size}",
                key=("max_model_len",),
            )
        return self
