"""The question to a proof process and its answer; both are JSON. Imports neither vLLM nor torch.

Sizes are the node's: what is proved is what will run.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HotSizes(_Form):
    """One index group as the node will have it, and how many requests share a step."""

    topk: int
    query_len: int
    """Decode rows of a request in a step: its drafts and one more."""
    start_rows: int
    """Hot rows of a request with which vLLM's kernels would run and hisparsed's start."""
    most_rows: int
    """Hot rows that our tables must have room for."""
    row_bytes: int
    layers: int
    """Sparse-MLA layers that share one resolve."""
    max_num_seqs: int
    max_model_len: int
    block_tokens: int = 64


class ChunkSizes(_Form):
    """Indexer chunks in host blocks, as the offload pool copies them."""

    layers: int
    """Slices of a host block."""
    slice_bytes: int
    pages: int
    """Indexer pages of a GPU block."""
    page_bytes: int


class Question(_Form):
    """``device`` is the number of a GPU among those that the process sees. ``hot``: ``None`` where
    the configuration has chosen the kernels already."""

    device: int
    hot: HotSizes | None
    chunks: ChunkSizes


class Timing(_Form):
    """Microseconds of one resolve and the gathers of its layers, the median of many steps."""

    requests: int
    ours_us: float
    vllm_us: float

    @property
    def ratio(self) -> float:
        return self.ours_us / self.vllm_us if self.vllm_us > 0 else float("inf")


class HotProof(_Form):
    """``difference`` is the first row that attention would have read wrong; ``error`` says why
    there is no comparison. Both are ``None`` where all rows were right."""

    difference: str | None = None
    error: str | None = None
    rows: int = 0
    """Compared, over all layers and steps."""
    graph: bool = False
    """Whether a recorded graph was replayed too."""
    timings: tuple[Timing, ...] = ()

    @property
    def ratio(self) -> float | None:
        """Our time in vLLM's, of the number of requests where it is worst."""
        return max((one.ratio for one in self.timings), default=None)


class ChunkProof(_Form):
    difference: str | None = None
    error: str | None = None
    chunks: int = 0
    """Stored, loaded and compared."""
    store_gib_per_s: float = 0.0
    load_gib_per_s: float = 0.0


class Proof(_Form):
    """Of one GPU. ``hot`` is ``None`` where it was not asked for."""

    device: int
    hot: HotProof | None = None
    chunks: ChunkProof
    seconds: float = 0.0
