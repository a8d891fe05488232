"""The OpenHands workload that vLLM's HiSparse measurements use, made from its published sizes."""

from __future__ import annotations

from hisparsed.replay.model import BlockRun, Call, Session, Trace

NAME = "openhands"
TURNS = 13
FIRST_TOKENS = 74_160
LATER_TOKENS = 753
ANSWER_TOKENS = 220
_BLOCK_TOKENS = 64


def openhands_trace() -> Trace:
    """One session of 13 turns without pauses; every play of it has a prefix of its own."""
    calls = []
    for turn in range(TURNS):
        tokens = FIRST_TOKENS + turn * (LATER_TOKENS + ANSWER_TOKENS)
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
    return Trace(NAME, _BLOCK_TOKENS, (Session(NAME, tuple(calls), 0.0),))
