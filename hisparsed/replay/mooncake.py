"""Reads recorded chat requests (one request a line) into the trace model.

Each request is a session of one call that starts at its recorded time; prefixes are shared across
sessions. A last block that is not full keeps its recorded id as the call's tail.
"""

from hisparsed.replay.model import BlockNames, BlockRun, Call, Session
from hisparsed.replay.records import Record

BLOCK_TOKENS = 512


def read_session(record: Record, names: BlockNames) -> Session:
    """The one-call session of one line; UserError where a field is wrong."""
    input_tokens = record.count("input_length", least=1)
    full_blocks, tail_tokens = divmod(input_tokens, BLOCK_TOKENS)
    hash_ids = record.items("hash_ids")
    if not all(type(value) is int and value >= 0 for value in hash_ids):
        raise record.wrong("hash_ids", "a list of whole numbers of 0 or more")
    if len(hash_ids) != full_blocks + (tail_tokens > 0):
        right = (
            f"{len(hash_ids)} blocks of {BLOCK_TOKENS} tokens as in hash_ids, the last may be short"
        )
        raise record.wrong("input_length", right)
    session_id = f"request_{record.line}"
    tail = (
        names.block("mooncake", hash_ids[-1]) if tail_tokens else names.block("tail", record.line)
    )
    call = Call(
        blocks=_runs([names.block("mooncake", local) for local in hash_ids[:full_blocks]]),
        tail_block=tail,
        input_tokens=input_tokens,
        output_tokens=record.count("output_length"),
        think_time_s=0.0,
        api_time_s=None,
    )
    return Session(session_id, (call,), record.seconds("timestamp") / 1000)


def _runs(ids: list[int]) -> tuple[BlockRun, ...]:
    runs: list[BlockRun] = []
    for block in ids:
        if runs and block == runs[-1].first + runs[-1].count:
            runs[-1] = BlockRun(runs[-1].first, runs[-1].count + 1)
        else:
            runs.append(BlockRun(block, 1))
    return tuple(runs)
