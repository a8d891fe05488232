"""Whose kernels the next engine runs, and whether chunks may be copied: asked before vLLM is
configured, since the choice decides hot rows, connector and worker extension.

Proofs are made where nothing is kept for these GPUs, this driver, these versions and sizes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from hisparsed.config.node import NodeConfig
from hisparsed.engine.compat.features import missing_features
from hisparsed.engine.compat.versions import installed_vllm
from hisparsed.engine.cuda import checks, launch
from hisparsed.engine.cuda.checks import MachineFacts
from hisparsed.engine.cuda.model_config import ModelFacts
from hisparsed.engine.cuda.nvml import GpuReader, nvidia_library
from hisparsed.engine.cuda.proof.kept import Basis, Doubt, KeptProofs, versions
from hisparsed.engine.cuda.proof.question import Proof, Question
from hisparsed.engine.cuda.proof.ranks import prove_all
from hisparsed.engine.cuda.proof.sizes import chunk_sizes, hot_sizes
from hisparsed.engine.cuda.proof.verdict import HotVerdict, chunks_problem, judge_hot
from hisparsed.engine.kernel_choice import KernelReason, KernelsStatus

Prove = Callable[[Sequence[Question]], Awaitable[tuple[Proof, ...]]]


@dataclass(frozen=True)
class Cards:
    """The basis of a proof in addition to versions and sizes. ``names``: one per rank."""

    names: tuple[str, ...]
    driver: str | None


@dataclass(frozen=True)
class Around:
    """What is outside: the defaults are the machine's own, tests give others."""

    cards: Callable[[int], Cards]
    machine: Callable[[], MachineFacts]
    prove: Prove
    wall_clock: Callable[[], float] = time.time


def read_cards(ranks: int) -> Cards:
    """The first ``ranks`` GPUs that may be used, and the driver; may block as long as NVML does."""
    reader = GpuReader(nvidia_library(), os.environ, on_unreadable=lambda _: None)
    try:
        gpus, driver = reader.read(), reader.driver()
    finally:
        reader.close()
    return Cards(tuple(f"{gpu.name} {gpu.uuid}" for gpu in gpus[:ranks]), driver)


AROUND = Around(
    cards=read_cards,
    machine=lambda: launch.read_machine_facts(on_unreadable=lambda _: None),
    prove=prove_all,
)


def with_kernels(config: NodeConfig, kernels: str) -> NodeConfig:
    """``config`` with ``auto`` decided."""
    cuda = config.cuda.model_copy(update={"kernels": kernels})
    return config.model_copy(update={"cuda": cuda})


async def choose_kernels(
    config: NodeConfig,
    kept: KeptProofs,
    *,
    start_multiplier: float,
    most_multiplier: float,
    around: Around = AROUND,
) -> KernelsStatus:
    """Multipliers in top-k: of the first lease, and the largest that the policy allows.

    Raises ``UserError`` for a model that cannot be read; nothing could be started with it.
    """
    cuda = config.cuda
    model = await asyncio.to_thread(launch.known_facts, config)
    problem = None
    if cuda.kernels == "auto":
        problem = await asyncio.to_thread(
            ours_problem, config, model, most_multiplier, around.machine
        )
    asks_hot = cuda.kernels == "auto" and problem is None
    cards = await asyncio.to_thread(around.cards, cuda.tensor_parallel_size)
    basis = Basis(
        gpus=cards.names,
        driver=cards.driver,
        versions=versions(),
        hot=hot_sizes(
            config, model, start_multiplier=start_multiplier, most_multiplier=most_multiplier
        )
        if asks_hot
        else None,
        chunks=chunk_sizes(config, model),
    )
    found = kept.find(basis)
    if found is None:
        questions = [
            Question(device=rank, hot=basis.hot, chunks=basis.chunks)
            for rank in range(cuda.tensor_parallel_size)
        ]
        found = await around.prove(questions), around.wall_clock()
        kept.keep(basis, *found)
    proofs, at_unix_s = found
    verdict = None
    if problem is not None:
        verdict = HotVerdict(KernelReason.NOT_POSSIBLE, problem)
    elif asks_hot:
        verdict = doubted(judge_hot(proofs, cuda.kernels_max_ratio), kept.doubt(basis), kept)
    return kernels_status(config, verdict, chunks_problem(proofs), at_unix_s)


def ours_problem(
    config: NodeConfig,
    model: ModelFacts,
    most_multiplier: float,
    machine: Callable[[], MachineFacts],
) -> str | None:
    """Why our kernels cannot run with this configuration, whatever they would prove."""
    ours = with_kernels(config, "hisparsed")
    problems = [
        *missing_features(ours, installed_vllm() or ""),
        *checks.model_problems(ours, model, most_multiplier),
        *checks.size_problems(ours, model, machine(), most_multiplier),
    ]
    return problems[0] if problems else None


def doubted(verdict: HotVerdict, doubt: Doubt | None, kept: KeptProofs) -> HotVerdict:
    """Ours are not used once an engine that ran them was wrong, whatever they prove."""
    if doubt is None or not verdict.ours:
        return verdict
    because = f"{doubt.why}; remove {kept.path} to check them again"
    return HotVerdict(KernelReason.DISTRUSTED, because, verdict.ratio, verdict.ranks)


def kernels_status(
    config: NodeConfig, verdict: HotVerdict | None, chunks: str | None, at_unix_s: float | None
) -> KernelsStatus:
    """``verdict`` is ``None`` where the document names the kernels."""
    asked = config.cuda.kernels
    if verdict is None:
        named = asked if asked != "auto" else "vllm"
        verdict = HotVerdict(KernelReason.CONFIGURED, f"cuda.kernels is {named}")
        ours = named == "hisparsed"
    else:
        ours = verdict.ours
    whose = "hisparsed's kernels size hot buffers live" if ours else "vLLM's kernels, one hot size"
    return KernelsStatus(
        asked=asked,
        used="hisparsed" if ours else "vllm",
        reason=verdict.reason,
        sentence=f"{whose}: {verdict.because}",
        max_ratio=config.cuda.kernels_max_ratio,
        ratio=verdict.ratio,
        ranks=verdict.ranks,
        proved_unix_s=at_unix_s,
        offload_trusted=chunks is None,
        offload_sentence=""
        if chunks is None
        else f"nothing is lent to the offload pool, because its copies are not checked: {chunks}",
    )
