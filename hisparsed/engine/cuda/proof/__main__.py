"""``python -m hisparsed.engine.cuda.proof``: the question on standard input, the answer on output.

Whatever libraries write to standard output goes to standard error. The answer reports a part that
cannot be carried out; the exit code is then 0 too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from hisparsed.engine.cuda.proof.question import ChunkProof, HotProof, Proof, Question
from hisparsed.engine.cuda.proof.ranks import PARENT_ENV
from hisparsed.engine.plugin import end_with

_Part = TypeVar("_Part", HotProof, ChunkProof)


def main() -> None:
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if (parent := os.environ.get(PARENT_ENV)) is not None:
        end_with(int(parent))
    question = Question.model_validate_json(sys.stdin.read())
    with answer:
        answer.write(prove(question).model_dump_json() + "\n")


def prove(question: Question) -> Proof:
    """Of one device of this process. Raises ``ImportError`` where torch or vLLM is missing."""
    began_s = time.monotonic()
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    device = torch.device("cuda", question.device)
    torch.cuda.set_device(question.device)
    # First: after an error of a kernel the device serves this process no more.
    chunks = _carried_out(ChunkProof, lambda: _chunks(question, device))
    hot = None
    if question.hot is not None:
        sizes = question.hot
        hot = _carried_out(HotProof, lambda: _hot(sizes, device))
    return Proof(
        device=question.device,
        hot=hot,
        chunks=chunks,
        seconds=round(time.monotonic() - began_s, 3),
    )


def _hot(sizes: object, device: object) -> HotProof:
    from hisparsed.engine.cuda.proof.hot import prove_hot

    return prove_hot(sizes, device)  # type: ignore[arg-type]


def _chunks(question: Question, device: object) -> ChunkProof:
    from hisparsed.engine.cuda.proof.chunks import prove_chunks

    return prove_chunks(question.chunks, device)  # type: ignore[arg-type]


def _carried_out(part: type[_Part], work: Callable[[], _Part]) -> _Part:
    try:
        return work()
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        return part(error=f"{type(error).__name__}: {first}"[:400])


if __name__ == "__main__":
    main()
