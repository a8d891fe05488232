"""The description of a node: its model, memory, bandwidths and speeds.

`hisparsed plan` and the simulated node use it. Reads and checks; does no arithmetic. The shipped
files in `etc/nodes` say where each figure comes from.
"""

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hisparsed.config.node import shipped_config
from hisparsed.errors import UserError
from hisparsed.policy.document import load_document
from hisparsed.policy.problems import refuse
from hisparsed.policy.units import ByteSize, Fraction

Count = Annotated[int, Field(ge=1, le=2**31, strict=True)]
Few = Annotated[int, Field(ge=1, le=4096, strict=True)]
"""A count of things such as layers."""
Positive = Annotated[float, Field(ge=1e-6, le=1e15, allow_inf_nan=False)]
Share = Annotated[Fraction, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelDescription(_Section):
    """A sparse-MLA model with an indexer (DSA), as its `config.json` has it."""

    layers: Few
    index_every: Count
    """Layers that share one indexer's top-k."""
    index_offset: Annotated[int, Field(ge=0, le=4096, strict=True)]
    """Layers before this one have their own indexer."""
    row_bytes: Count
    """One KV row of one sparse-MLA layer."""
    published_row_bytes: Count
    """The row that vLLM's published concurrency calculator counts with."""
    index_row_bytes: Count
    """One row of one indexer."""
    topk: Count
    heads: Count
    row_values: Count
    """Values that one head multiplies for a selected row: latent twice and rope."""
    index_heads: Count
    index_dim: Count
    experts: Count
    experts_per_token: Count
    routed_params: Positive
    other_params: Positive
    """Parameters that every token uses."""
    max_model_len: Count

    def index_leaders(self) -> tuple[int, ...]:
        """Layers that own an indexer, ascending."""
        return tuple(
            layer
            for layer in range(self.layers)
            if max(layer - self.index_offset + 1, 0) % self.index_every == 0
        )


class GpuDescription(_Section):
    """One GPU of `count`; bandwidths are bytes per second."""

    count: Few
    kv_memory: ByteSize = Field(gt=0)
    """Left for KV on each GPU."""
    fp8_tflops: Positive
    memory_bandwidth: ByteSize = Field(gt=0)
    row_read_bandwidth: ByteSize = Field(gt=0)
    """Scattered KV rows that GPU threads read from pinned host memory."""
    copy_bandwidth: ByteSize = Field(gt=0)
    """Whole pages by copy engine, each way."""


class HostDescription(_Section):
    budget: ByteSize = Field(gt=0)
    """Memory of both pools together."""
    memory_bandwidth: ByteSize = Field(gt=0)
    """Bytes per second that all GPUs together can read from host memory."""


class EngineDescription(_Section):
    block_tokens: Count
    max_num_seqs: Annotated[int, Field(ge=1, le=65_536, strict=True)]
    max_num_batched_tokens: Count
    concurrent_batches: Few
    """Batches in flight: 2 with asynchronous scheduling."""
    speculative_tokens: Annotated[int, Field(ge=0, le=64, strict=True)]
    """Drafts of multi-token prediction that a decode step verifies."""


class SpeedDescription(_Section):
    """The share of its data sheet that the hardware reaches, and the other costs of a step."""

    prefill_efficiency: Share
    decode_efficiency: Share
    """Share of memory bandwidth that a decode step reaches."""
    step_overhead_ms: Positive
    """Launches, collectives and sampling of one step."""
    draft_overhead_ms: float = Field(default=0.0, ge=0, le=1e6)
    """The same of one pass of the drafting layer, and the output head that it uses."""
    gather_overlap: Fraction
    """Share of the row reads that computing hides."""
    prefill_reads: Fraction = 1.0
    """Share of a prompt's rows on the host that each GPU reads for every chunk. vLLM reads all;
    less is for studies: GPUs that read a part each and exchange, or only what is selected."""
    acceptance: tuple[Fraction, ...]
    """Chance that each draft is accepted when those before it were."""


class CoreDescription(_Section):
    """CPU time of the engine core's thread, for schedules and their results. If batches are
    scheduled ahead, a step takes at least this sum; otherwise the sum is added to it."""

    step_ms: float = Field(default=0.0, ge=0, le=1e6)
    """For every step."""
    request_ms: float = Field(default=0.0, ge=0, le=1e6)
    """For each request in the step."""
    token_us: float = Field(default=0.0, ge=0, le=1e6)
    """For each token that the step computes, in microseconds."""


class RowsDescription(_Section):
    """How decode steps select rows; points are [multiplier or rows, share], ascending."""

    miss_curve: tuple[tuple[Positive, Fraction], ...] = Field(min_length=2)
    """Misses of the selected rows by hot rows / top-k."""
    union: tuple[Positive, ...] = Field(min_length=1)
    """Distinct rows / top-k that 1, 2, ... rows of one request select in one step."""
    spread: float = Field(default=0.0, ge=0, le=10)
    """How much requests differ: each misses as if its buffer were larger or smaller by a factor of
    up to 1 + spread."""


class NodeDescription(_Section):
    """A node. ``load_node_description`` reads one."""

    title: str
    model: ModelDescription
    gpu: GpuDescription
    host: HostDescription
    engine: EngineDescription
    speed: SpeedDescription
    rows: RowsDescription
    core: CoreDescription = CoreDescription()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        drafts = self.engine.speculative_tokens
        if len(self.speed.acceptance) < drafts:
            raise refuse(
                "acceptance",
                f"has {len(self.speed.acceptance)} values for {drafts} speculative tokens",
                hint="give one for each draft",
                key=("speed", "acceptance"),
            )
        if self.model.experts_per_token > self.model.experts:
            raise refuse(
                "experts_per_token",
                f"{self.model.experts_per_token} is more than the {self.model.experts} experts",
                hint="a token reaches some of the experts, or all",
                key=("model", "experts_per_token"),
            )
        leaders = len(self.model.index_leaders())
        most = self.model.layers * self.model.row_bytes // max(1, leaders)
        if self.model.index_row_bytes > most:
            raise refuse(
                "index_row_bytes",
                f"{self.model.index_row_bytes} for {leaders} layers is more than all rows of a "
                f"token together",
                hint=f"write at most {most}",
                key=("model", "index_row_bytes"),
            )
        if len(self.rows.union) < drafts + 1:
            raise refuse(
                "union",
                f"has {len(self.rows.union)} values for steps of {drafts + 1} rows",
                hint="give one for each number of rows",
                key=("rows", "union"),
            )
        for before, after in pairwise(self.rows.miss_curve):
            if after[0] <= before[0] or after[1] > before[1]:
                raise refuse(
                    "miss_curve",
                    f"goes from {before} to {after}",
                    hint="multipliers rise, misses do not",
                    key=("rows", "miss_curve"),
                )
        return self

    @property
    def query_len(self) -> int:
        """Rows of one request in a decode step."""
        return 1 + self.engine.speculative_tokens


def load_node_description(name: str) -> NodeDescription:
    """The shipped description of that name, or the file at that path.

    Raises ``UserError`` where there is neither, ``ConfigError`` where it is wrong.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        try:
            path = shipped_config(f"nodes/{name}.yaml")
        except FileNotFoundError:
            raise UserError(
                f"--node: {name!r} is not known; name a .yaml file or one of "
                f"{', '.join(shipped_nodes())}"
            ) from None
    return load_document(path, NodeDescription).value


def shipped_nodes() -> list[str]:
    """Names of the descriptions that come with the package."""
    folder = shipped_config("policy.yaml").parent / "nodes"
    return sorted(path.stem for path in folder.glob("*.yaml"))
