"""The OpenHands workload that vLLM's HiSparse measurements use, made from its published sizes."""

from __future__ import annotations

from hisparsed.errors import UserError
from hisparsed.replay.model import BlockRun, Call, Session, Trace

NAME = "openhands"
TURNS = 13
FIRST_TOKENS = 74_160
LATER_TOKENS = 753
ANSWER_TOKENS = 220
_BLOCK_TOKENS = 64


def is_openhands(name: str) -> bool:
    """Whether a trace's name means this workload: openhands, or openhands@TOKENS."""
    return name.partition("@")[0] == NAME


def openhands_trace(name: str = NAME) -> Trace:
    """One session of 13 turns without pauses; every play of it has a prefix of its own.

    ``openhands@1000000`` has the first prompt so long instead. Raises ``UserError``.
    """
    first, calls = _first_tokens(name), []
    for turn in range(TURNS):
        tokens = first + turn * (LATER_TOKENS + ANSWER_TOKENS)
        full = tokens // _BLOCK_TOKENS
        calls.append(
            Call(
                blocks=(BlockRun(0, full),),
                tail_block=full,
                input_tokens=tokens,
                output_tokens=ANSWER_TOKENS,
                think_time_s=0.0,
                api_time_s=None,
            )
        )
    return Trace(name, _BLOCK_TOKENS, (Session(name, tuple(calls), 0.0),))


def _first_tokens(name: str) -> int:
    _, given, text = name.partition("@")
    if not given:
        return FIRST_TOKENS
    if not text.isdecimal() or int(text) < _BLOCK_TOKENS:
        raise UserError(
            f"--trace {name}: {text!r} is no length of a prompt; write its tokens, at least "
            f"{_BLOCK_TOKENS}, as in openhands@1000000"
        )
    return int(text)
