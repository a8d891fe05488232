"""One proof process for each GPU, all at once, in bounded time.

A process that fails, hangs or answers nonsense is an answer too: its GPU has proved nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

from pydantic import ValidationError

from hisparsed.engine.cuda.proof.question import ChunkProof, HotProof, Proof, Question
from hisparsed.engine.plugin import LAUNCHED_ENV

LIMIT_S = 180.0
"""Imports, kernels that are compiled for the first time, and some seconds of work."""
COMMAND = (sys.executable, "-m", "hisparsed.engine.cuda.proof")
PARENT_ENV = "HISPARSED_PROOF_OF"
"""The process that waits for the answer."""
_LAST_BYTES = 400


async def prove_all(
    questions: Sequence[Question],
    *,
    command: Sequence[str] = COMMAND,
    limit_s: float = LIMIT_S,
) -> tuple[Proof, ...]:
    """An answer for each question, in order; never raises for what a process does.

    Where it is cancelled, no process is left.
    """
    return tuple(
        await asyncio.gather(*(_prove(question, command, limit_s) for question in questions))
    )


async def _prove(question: Question, command: Sequence[str], limit_s: float) -> Proof:
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(),
            start_new_session=True,
        )
    except OSError as error:
        return _nothing(question, f"no process could be started: {error}")
    try:
        async with asyncio.timeout(limit_s):
            out, err = await process.communicate(question.model_dump_json().encode())
    except TimeoutError:
        return _nothing(question, f"it did not end within {limit_s:g}s")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if process.returncode:
        last = err[-_LAST_BYTES:].decode(errors="replace").strip().splitlines()[-1:]
        return _nothing(question, " ".join([f"it ended with {process.returncode}", *last]))
    try:
        answer = Proof.model_validate_json(out)
    except ValidationError:
        return _nothing(question, "its answer cannot be read")
    if answer.device != question.device:
        return _nothing(question, f"it answered for GPU {answer.device}")
    return answer


def _environment() -> dict[str, str]:
    """The process is no engine, and ends with this one."""
    ours = {name: value for name, value in os.environ.items() if name != LAUNCHED_ENV}
    return {**ours, PARENT_ENV: str(os.getpid())}


def _nothing(question: Question, why: str) -> Proof:
    hot = None if question.hot is None else HotProof(error=why)
    return Proof(device=question.device, hot=hot, chunks=ChunkProof(error=why))
