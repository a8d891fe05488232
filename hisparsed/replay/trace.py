"""Opens a trace file of any known format and hands out one model.

Formats are told apart by the fields of each line: recorded coding-agent sessions or recorded chat
requests, gzip or plain. The trace that ships with the project is the default.
"""

from pathlib import Path

from hisparsed.errors import UserError
from hisparsed.replay import claude_code, mooncake
from hisparsed.replay.model import BlockNames, Session, Trace
from hisparsed.replay.records import Record, text_lines

SHIPPED_TRACE = Path(__file__).parent / "traces" / "claude-code-64k.jsonl.gz"


def load_trace(path: Path = SHIPPED_TRACE) -> Trace:
    """All sessions of `path`; UserError (file, line, field, what is right) if anything is wrong."""
    names = BlockNames()
    sessions: list[Session] = []
    block_tokens: int | None = None
    for number, text in text_lines(path):
        record = Record.parse(path, number, text)
        if "requests" in record.values:
            found = claude_code.BLOCK_TOKENS
            sessions.extend(claude_code.read_sessions(record, names))
        elif "hash_ids" in record.values:
            found = mooncake.BLOCK_TOKENS
            sessions.append(mooncake.read_session(record, names))
        else:
            keys = ", ".join(sorted(record.values)) or "none"
            raise UserError(
                f"{path}: line {number}: the fields ({keys:.80}) fit no known trace; need "
                "`requests` and `block_size` (coding-agent sessions), or `hash_ids` and "
                "`input_length` (chat)"
            )
        if block_tokens not in (None, found):
            raise UserError(
                f"{path}: line {number}: blocks of {found} tokens after lines with {block_tokens}; "
                "one file must hold one format"
            )
        block_tokens = found
    _refuse_repeated_ids(path, sessions)
    if block_tokens is None:
        raise UserError(f"{path}: no sessions in it; is this the whole file?")
    return Trace(path.name, block_tokens, tuple(sessions))


def _refuse_repeated_ids(path: Path, sessions: list[Session]) -> None:
    seen: set[str] = set()
    for session in sessions:
        if session.id in seen:
            raise UserError(f"{path}: two sessions have the id {session.id!r}; each needs its own")
        seen.add(session.id)
