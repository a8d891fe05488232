"""The sections of the node document that have their own keys and rules.

API limits, the CUDA node, the reference node, prefill/decode disaggregation and supervision. Each
class reads and checks one section. What the machine and the model allow is checked at start.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hisparsed.policy.problems import refuse
from hisparsed.policy.units import Duration, Fraction, format_duration

Timeout = Annotated[Duration, Field(gt=0)]


class ApiLimits(BaseModel):
    """Limits of one listener. Bodies are bounded at 64 MiB, headers at 64 KiB."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    connections: int = Field(default=4_096, ge=16, le=100_000)
    """When all are in use, the client that has been idle or sending for longest is disconnected."""
    header_timeout: Timeout = 10.0
    """From connecting, or a request's first byte, until its headers are whole."""
    body_timeout: Timeout = 60.0
    """From the headers until the body is whole."""
    idle_timeout: Timeout = 75.0
    """Between two requests of one connection."""
    read_timeout: Timeout = 60.0
    """While a client reads nothing of its answer; then its call is ended."""


Count = Annotated[int, Field(ge=1, le=10**6, strict=True)]
Many = Annotated[int, Field(ge=1, le=10**9, strict=True)]
"""Tokens, rows or blocks."""
Few = Annotated[int, Field(ge=1, le=1024, strict=True)]
"""GPUs, layers or threads."""


class CudaConfig(BaseModel):
    """Counts of what the names say; ``None`` leaves a value to vLLM."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor_parallel_size: Few = 1
    """GPUs that share the model; all on this machine."""
    max_model_len: Many | None = None
    """Tokens of prompt and answer together; ``None`` is what the model's config says."""
    max_num_seqs: Count | None = None
    """Requests running at once."""
    max_num_batched_tokens: Many | None = None
    """Tokens computed in one engine step."""
    gpu_memory_utilization: Annotated[Fraction, Field(gt=0)] | None = None
    """Share of each GPU's memory that the engine may take."""
    kv_cache_dtype: Literal["fp8_ds_mla", "bfloat16"] = "fp8_ds_mla"
    """How a sparse-MLA row is kept: 656 bytes per layer in FP8, 1152 in bfloat16."""
    hot_rows: Many | None = None
    """Rows of a hot buffer; ``None`` leaves it to the policy.

    vLLM's kernels have one size from start to end: the policy's `hot.start`. With hisparsed's this
    is the largest lease: the policy's `hot.max`."""
    hot_scratch: bool = False
    """Reserve GPU blocks for rows of drafts that do not fit a hot buffer, so that one may be as
    small as one top-k. Takes drafts x top-k rows for each of `max_num_seqs`; not with `kernels:
    vllm`, and of no use where `auto` falls back to them."""
    eager_host_mirror: bool = True
    """Copy decode rows to the host as they are written, not when their page leaves the GPU."""
    speculative_tokens: Annotated[int, Field(ge=0, le=16, strict=True)] = 0
    """Drafts of the model's own MTP layer that are verified with each token."""
    kernels: Literal["auto", "vllm", "hisparsed"] = "auto"
    """The kernels that find rows in hot buffers. `hisparsed` sizes buffers request by request,
    live; `auto` uses them if they prove correct and fast enough on every GPU before the engine
    starts, else vLLM's."""
    kernels_max_ratio: Annotated[float, Field(ge=0.1, le=10.0)] = 1.25
    """With `auto`: the largest ratio of hisparsed's time for a step to vLLM's."""


class ReferenceConfig(BaseModel):
    """A sparse-MLA model with fixed random weights. Counts of what the names say."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: Few = 8
    index_groups: Few = 2
    index_topk: Count = 64
    """Tokens the indexer picks for each query."""
    block_size: Count = 16
    """Tokens in a KV block, on the GPU and in the host pool."""
    gpu_blocks: Many = 2048
    """Blocks of the slab that replaces GPU memory."""
    max_model_len: Many = 4096
    """Tokens of prompt and answer together."""
    max_num_seqs: Count = 8
    max_num_batched_tokens: Many = 512
    """Tokens computed in one engine step."""
    speculative_tokens: Annotated[int, Field(ge=0, le=16, strict=True)] = 0
    """Drafts that are verified with each token; 0 decodes one by one."""
    ack_lag_steps: Annotated[int, Field(ge=0, le=64, strict=True)] = 1
    """Engine steps that a page transfer takes, as a DMA engine's would."""
    eager_host_mirror: bool = True
    """Copy decode rows to the host as they are written, not when their page is full."""
    threads: Few = 1
    """CPU threads that the model computes with."""
    seed: Annotated[int, Field(ge=0, lt=2**32, strict=True)] = 0

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


_OF_ROLE: Final = {"lease": "prefill", "timeout": "decode", "peers": "decode"}
"""Keys that one role has, whatever the node."""
_NOT_ON: Final = {
    ("reference", "prefill"): ("nixl",),
    ("reference", "decode"): ("host", "port", "nixl"),
    # vLLM's NIXL has its own limits.
    ("cuda", "decode"): ("timeout",),
}
"""Keys that a kind of node does not have, by kind and role."""


class Refused(NamedTuple):
    """``key``: path from the section. ``hint``: the expected value."""

    key: tuple[str, ...]
    message: str
    hint: str


class DisaggregationConfig(BaseModel):
    """``role`` decides which of the other keys are allowed; the rest are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["prefill", "decode"]
    """A CUDA node decodes only; vLLM itself prefills for it."""
    host: str = Field(default="127.0.0.1", min_length=1)
    """Address at which this node listens for the other, and which a prefill node announces."""
    port: Annotated[int, Field(ge=1, le=65535, strict=True)] = 14579
    lease: Duration = Field(default=60.0, gt=0)
    """Seconds that a prefill node keeps a prefix for a decode node."""
    timeout: Duration = Field(default=10.0, gt=0)
    """Seconds after which a decode node computes the prompt itself. Not on CUDA."""
    peers: tuple[Annotated[str, Field(pattern=r"^.+:\d{1,5}$")], ...] = ()
    """Prefill nodes as host:port that a decode node fetches from; empty: on this machine."""
    nixl: dict[str, Any] = Field(default_factory=dict)
    """Passed through to vLLM's NixlConnector on CUDA, such as `backends: [UCX]`."""

    @model_validator(mode="after")
    def _keys_are_of_the_role(self) -> Self:
        for key, role in _OF_ROLE.items():
            if key in self.model_fields_set and role != self.role:
                raise refuse(
                    "other_role",
                    f"has no meaning on a {self.role} node",
                    hint=f"remove it, or set role: {role}",
                    key=(key,),
                )
        return self

    def refused_on(self, kind: str) -> Refused | None:
        """The settings that a node of ``kind`` does not support, if any."""
        if kind == "simulated":
            return Refused(
                (),
                "a simulated node does not hand over prefixes in this version",
                "remove it, or set node: reference",
            )
        if kind == "cuda" and self.role == "prefill":
            return Refused(
                ("role",),
                '"prefill" cannot be on a cuda node: vLLM\'s NIXL reads from no node that keeps KV '
                "in host memory",
                "prefill with vllm serve without HiSparse, as docs/cuda.md shows, and decode here",
            )
        for key in _NOT_ON.get((kind, self.role), ()):
            if key in self.model_fields_set:
                where = f"a {kind} node that decodes" if self.role == "decode" else f"a {kind} node"
                return Refused((key,), f"has no meaning on {where}", "remove it")
        return None


_PositiveDuration = Annotated[Duration, Field(gt=0)]
_SomeSeconds = Annotated[Duration, Field(ge=1)]


class SupervisionConfig(BaseModel):
    """An engine that dies or hangs is restarted inside the daemon, a few times."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    most_restarts: Annotated[int, Field(ge=0, le=1000, strict=True)] = 5
    """Within `window`; one more and the daemon ends with exit code 70. 0: it ends at once."""
    window: _SomeSeconds = 3600.0
    first_wait: _PositiveDuration = 1.0
    """Before the first restart; doubled with each further one in the window."""
    longest_wait: _PositiveDuration = 120.0
    """At most this long."""
    hang_after: _SomeSeconds | None = 360.0
    """An engine without a report for this long is killed and restarted; null: never. Longer than
    the longest step (vLLM itself gives one 300 s), shorter than the service manager's watchdog.
    Time in which a compiler runs below the engine does not count, up to half an hour."""
    start_tries: Annotated[int, Field(ge=1, le=100, strict=True)] = 2
    """Failed starts after which changed values are quarantined and the last good ones return."""

    @model_validator(mode="after")
    def _waits_in_order(self) -> Self:
        if self.longest_wait < self.first_wait:
            raise refuse(
                "wait_below_first",
                f"is below first_wait {format_duration(self.first_wait)}",
                hint="write at least that",
                key=("longest_wait",),
            )
        return self
