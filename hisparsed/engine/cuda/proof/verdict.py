"""The verdict from the answers of all GPUs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hisparsed.engine.cuda.proof.question import HotProof, Proof
from hisparsed.engine.kernel_choice import KernelReason, RankTimes


@dataclass(frozen=True)
class HotVerdict:
    """``reason`` is PROVED, or why vLLM's kernels are used; ``because`` a clause for people."""

    reason: KernelReason
    because: str
    ratio: float | None = None
    ranks: list[RankTimes] = field(default_factory=list)

    @property
    def ours(self) -> bool:
        return self.reason is KernelReason.PROVED


def judge_hot(proofs: Sequence[Proof], max_ratio: float) -> HotVerdict:
    """A wrong row outweighs a missing answer, and that a slow one."""
    answers = [(one.device, one.hot or HotProof(error="it was not asked for")) for one in proofs]
    if not answers:
        return HotVerdict(KernelReason.UNPROVED, "no GPU was asked")
    ranks, ratio = _times(answers), _worst(answers)
    for gpu, proof in answers:
        if proof.difference is not None:
            because = f"on GPU {gpu} hisparsed's kernels read wrong rows: {proof.difference}"
            return HotVerdict(KernelReason.DIFFERENT, because, ratio, ranks)
    for gpu, proof in answers:
        why = proof.error
        if why is None and not (proof.timings and proof.rows):
            why = "nothing was compared or timed"
        if why is not None:
            because = f"the check of hisparsed's kernels on GPU {gpu} did not finish: {why}"
            return HotVerdict(KernelReason.UNPROVED, because, ratio, ranks)
    worst = max(ranks, key=lambda one: one.ours_us / max(one.vllm_us, 1e-9))
    times = (
        f"{worst.ours_us:.0f} us for vLLM's {worst.vllm_us:.0f} us at {worst.requests} requests "
        f"on GPU {worst.gpu}"
    )
    if ratio is None or not ratio <= max_ratio:
        share = "an unknown part" if ratio is None else f"{ratio:.2f}"
        because = f"hisparsed's kernels take {share} of vLLM's time, over {max_ratio:g}: {times}"
        return HotVerdict(KernelReason.SLOWER, because, ratio, ranks)
    rows = sum(proof.rows for _, proof in answers)
    because = (
        f"{rows:,} rows that attention reads were right on {len(answers)} GPUs, and hisparsed's "
        f"kernels take {ratio:.2f} of vLLM's time, at most {max_ratio:g}: {times}"
    )
    return HotVerdict(KernelReason.PROVED, because, ratio, ranks)


def _worst(answers: Sequence[tuple[int, HotProof]]) -> float | None:
    return max((proof.ratio for _, proof in answers if proof.ratio is not None), default=None)


def _times(answers: Sequence[tuple[int, HotProof]]) -> list[RankTimes]:
    worst = (
        (gpu, max(proof.timings, key=lambda one: one.ratio))
        for gpu, proof in answers
        if proof.timings
    )
    return [
        RankTimes(gpu=gpu, requests=one.requests, ours_us=one.ours_us, vllm_us=one.vllm_us)
        for gpu, one in worst
    ]


def chunks_problem(proofs: Sequence[Proof]) -> str | None:
    """Why nothing may be lent to the offload pool; ``None`` where every GPU copied right."""
    if not proofs:
        return "no GPU was asked"
    for proof in proofs:
        chunks = proof.chunks
        if chunks.difference is not None:
            return f"on GPU {proof.device} wrong bytes came back: {chunks.difference}"
    for proof in proofs:
        why = proof.chunks.error or ("" if proof.chunks.chunks else "nothing was copied")
        if why:
            return f"the check on GPU {proof.device} did not finish: {why}"
    return None
