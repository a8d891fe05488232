"""The kernels that find rows in hot buffers, vLLM's or hisparsed's, and why: as the status shows
it.

Chosen before each engine start. Imports neither vLLM nor torch.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict

Kernels = Literal["vllm", "hisparsed"]


class KernelReason(StrEnum):
    """Stable codes, for scripts and metrics."""

    CONFIGURED = "Configured"
    """`cuda.kernels` names them."""
    PROVED = "Proved"
    """hisparsed's kernels read the right rows on every GPU, and were fast enough."""
    DIFFERENT = "Different"
    """With hisparsed's kernels attention read another row."""
    SLOWER = "Slower"
    """hisparsed's kernels took longer than `cuda.kernels_max_ratio` allows."""
    UNPROVED = "Unproved"
    """The proof could not be carried out."""
    NOT_POSSIBLE = "NotPossible"
    """This vLLM, model or policy does not work with hisparsed's kernels."""
    DISTRUSTED = "Distrusted"
    """hisparsed's kernels passed, but an engine with them gave a wrong answer or had a kernel
    error."""

    @property
    def fell_back(self) -> bool:
        """Whether hisparsed's kernels were wanted and are not used."""
        return self not in (KernelReason.CONFIGURED, KernelReason.PROVED)


class RankTimes(BaseModel):
    """One GPU's resolve and gathers, microseconds per step, at the size where hisparsed's kernels
    did worst."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpu: int
    requests: int
    ours_us: float
    vllm_us: float


class KernelsStatus(BaseModel):
    """The kernels of the engine that runs, or is started."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    asked: Literal["auto", "vllm", "hisparsed"]
    used: Kernels
    reason: KernelReason
    sentence: str
    """All of it for people."""
    max_ratio: float
    """The largest share of vLLM's time that hisparsed's kernels may take."""
    ratio: float | None = None
    """The share that they took on the slowest GPU; `None` where it was not timed."""
    ranks: list[RankTimes] = []
    proved_unix_s: float | None = None
    """When the proof behind this choice was made."""
    offload_trusted: bool = True
    """Whether copies of indexer chunks passed their proof; without it nothing is lent."""
    offload_sentence: str = ""
