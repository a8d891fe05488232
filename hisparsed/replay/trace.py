"""Recorded traces: the model, the two file formats, and the reader.

A trace is sessions of calls over chained blocks. A block id stands for a block of tokens *and
everything before it*: two calls with the same id have the same prompt up to the end of that block.
Formats are distinguished by the fields of each line, gzip or plain: coding-agent sessions (one
session a line; a nested subagent becomes a session `parent/agent`; sessions whose tool and system
prompts have equal sizes are taken to share those blocks) and chat requests (one request a line;
each is a session of one call). A defect raises ``UserError`` with file, line, field, the value
found and the expected value. Nothing here is scaled, and nothing is text.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hisparsed.errors import UserError

_GZIP_MAGIC = b"\x1f\x8b"
_MAX_COUNT = 1 << 32


def _text_lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open("rb") as probe:
            zipped = probe.read(2) == _GZIP_MAGIC
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{path}: cannot read the file: {reason}; name a readable file") from error
    number = 0
    try:
        with gzip.open(path, "rb") if zipped else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                text = line.decode("utf-8").strip()
                if text:
                    yield number, text
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            f"{path}: line {number + 1}: the gzip data is torn ({error}); "
            "the file is not complete: fetch it again"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: line {number}: not UTF-8 text ({error.reason})") from error


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, text) of every line that is not blank, unzipped if it is gzip.

    Raises UserError for a file that is missing, torn, not text or empty.
    """
    empty = True
    for numbered in _text_lines(path):
        empty = False
        yield numbered
    if empty:
        raise UserError(f"{path}: the file is empty; at least one line is needed")


@dataclass(frozen=True, slots=True)
class Record:
    """One JSON object of a file, with the place it came from for error messages."""

    path: Path
    line: int
    where: str
    values: dict[str, Any]

    @classmethod
    def parse(cls, path: Path, line: int, text: str) -> "Record":
        """The object on one line; UserError when it is not a JSON object."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}: line {line}: not JSON at column {error.colno} ({error.msg}); "
                "each line must be one JSON object"
            ) from error
        if not isinstance(values, dict):
            raise UserError(f"{path}: line {line}: {text[:40]!r} is not a JSON object")
        return cls(path, line, "", values)

    def wrong(self, key: str, right: str) -> UserError:
        """The error for field `key`: `right` says what it should be."""
        found = f"found {self.values[key]!r:.60}" if key in self.values else "the field is missing"
        return UserError(f"{self.path}: line {self.line}: {self.where}{key}: {found}; need {right}")

    def count(self, key: str, least: int = 0) -> int:
        """A whole number of at least `least`."""
        value = self.values.get(key)
        if type(value) is not int or not least <= value < _MAX_COUNT:
            raise self.wrong(key, f"a whole number of {least} or more")
        return value

    def seconds(self, key: str) -> float:
        """A finite number of 0 or more."""
        value = self.values.get(key)
        number = type(value) is int or type(value) is float
        if value is None or not number or not 0 <= value < float("inf"):
            raise self.wrong(key, "a number of 0 or more")
        return float(value)

    def optional_seconds(self, key: str) -> float | None:
        """As `seconds`, or None where the field is missing or null."""
        return None if self.values.get(key) is None else self.seconds(key)

    def text(self, key: str) -> str:
        """A string that is not empty."""
        value = self.values.get(key)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "a text that is not empty")
        return value

    def items(self, key: str) -> list[Any]:
        """A list that is not empty."""
        value = self.values.get(key)
        if not isinstance(value, list) or not value:
            raise self.wrong(key, "a list that is not empty")
        return value

    def children(self, key: str) -> "list[Record]":
        """The objects of the list `key`, each knowing its place."""
        records = []
        for index, value in enumerate(self.items(key)):
            where = f"{self.where}{key}[{index}]."
            if not isinstance(value, dict):
                raise self.wrong(key, f"an object at position {index}, not {value!r:.40}")
            records.append(Record(self.path, self.line, where, value))
        return records


@dataclass(frozen=True, slots=True)
class BlockRun:
    """`count` blocks with consecutive ids from `first`."""

    first: int
    count: int


def block_ids(runs: tuple[BlockRun, ...]) -> Iterator[int]:
    """The ids of all blocks, first to last."""
    for run in runs:
        yield from range(run.first, run.first + run.count)


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded request: token counts as recorded, times in seconds.

    `tail_block` is the id of the tokens behind the last full block (`input_tokens` minus the full
    blocks). `think_time_s` is the client's pause between the end of the previous response and this
    call; `api_time_s` is how long the recorded response took, where the trace says.
    """

    blocks: tuple[BlockRun, ...]
    tail_block: int
    input_tokens: int
    output_tokens: int
    think_time_s: float
    api_time_s: float | None


@dataclass(frozen=True, slots=True)
class Session:
    """Calls that follow one another; `start_s` is when the trace started it (0 where unknown)."""

    id: str
    calls: tuple[Call, ...]
    start_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    """All sessions of one file, whose full blocks hold `block_tokens` tokens each."""

    name: str
    block_tokens: int
    sessions: tuple[Session, ...]


class BlockNames:
    """Gives every (name space, local id) its own number: ids never meet by accident."""

    _LOCAL_BITS = 40

    def __init__(self) -> None:
        self._spaces: dict[str, int] = {}

    def block(self, space: str, local_id: int) -> int:
        """The global id of `local_id` in `space`; consecutive local ids stay consecutive."""
        number = self._spaces.setdefault(space, len(self._spaces))
        return (number << self._LOCAL_BITS) + local_id


CODING_BLOCK = 64


def read_sessions(record: Record, names: BlockNames) -> Iterator[Session]:
    """The session of one line and then its subagents; UserError where a field is wrong."""
    if record.count("block_size") != CODING_BLOCK:
        raise record.wrong("block_size", str(CODING_BLOCK))
    trace_id = record.text("id")
    requests = record.children("requests")
    own = [item for item in requests if item.values.get("type") != "subagent"]
    if own:
        yield _coding_session(record, trace_id, trace_id, 0.0, own, names)
    for item in requests:
        if item.values.get("type") == "subagent":
            session_id = f"{trace_id}/{item.text('agent_id')}"
            calls = item.children("requests")
            yield _coding_session(item, trace_id, session_id, item.seconds("t"), calls, names)


def _coding_session(
    owner: Record,
    trace_id: str,
    session_id: str,
    start_s: float,
    requests: list[Record],
    names: BlockNames,
) -> Session:
    tools, system = owner.count("tool_tokens"), owner.count("system_tokens")
    local_runs = [_local_runs(request) for request in requests]
    shared = _SharedPrefix(f"shared {tools} {system}", (tools + system) // CODING_BLOCK)
    shared.learn(local_runs[0])
    calls = []
    for index, request in enumerate(requests):
        calls.append(
            Call(
                blocks=shared.rename(local_runs[index], trace_id, names),
                tail_block=names.block(f"tail {session_id}", index),
                input_tokens=request.count("in", least=1),
                output_tokens=request.count("out"),
                think_time_s=_think_time_s(requests[index - 1] if index else None, request),
                api_time_s=request.optional_seconds("api_time"),
            )
        )
    return Session(session_id, tuple(calls), start_s)


def _think_time_s(previous: Record | None, request: Record) -> float:
    """The client's pause before `request`.

    Where the previous call has no recorded duration, the recorded pause counts from an earlier end.
    Then the distance of the two starts is used, which is an upper bound.
    """
    if previous is None:
        return 0.0
    think_s = request.optional_seconds("think_time")
    api_s = previous.optional_seconds("api_time")
    if think_s is not None and api_s is not None:
        return think_s
    between_starts_s = request.seconds("t") - previous.seconds("t")
    return max(0.0, between_starts_s - (api_s or 0.0))


def _local_runs(request: Record) -> list[tuple[int, int]]:
    right = "a list of [first id, count] pairs of whole numbers, 1 or more"
    runs = []
    for run in request.items("hash_runs"):
        pair = isinstance(run, list) and len(run) == 2 and all(type(part) is int for part in run)
        if not pair or min(run) < 1:
            raise request.wrong("hash_runs", right)
        runs.append((run[0], run[1]))
    blocks = sum(count for _, count in runs)
    if blocks != request.count("in", least=1) // CODING_BLOCK:
        raise request.wrong("in", f"{blocks} full blocks of {CODING_BLOCK} tokens as in hash_runs")
    return runs


class _SharedPrefix:
    """The leading blocks of a session that other sessions with the same prompts also have.

    Learned from the first call, so a later call that starts differently keeps its own ids.
    """

    def __init__(self, space: str, blocks: int) -> None:
        self._space = space
        self._blocks = blocks
        self._position_of: dict[int, int] = {}

    def learn(self, runs: list[tuple[int, int]]) -> None:
        ids = (local for first, count in runs for local in range(first, first + count))
        for position, local in zip(range(self._blocks), ids, strict=False):
            self._position_of[local] = position

    def rename(
        self, runs: list[tuple[int, int]], trace_id: str, names: BlockNames
    ) -> tuple[BlockRun, ...]:
        renamed: list[BlockRun] = []
        for first, count in runs:
            shared = 0
            while shared < count and first + shared in self._position_of:
                shared += 1
            if shared:
                start = names.block(self._space, self._position_of[first])
                renamed.append(BlockRun(start, shared))
            if shared < count:
                start = names.block(trace_id, first + shared)
                renamed.append(BlockRun(start, count - shared))
        return tuple(renamed)


CHAT_BLOCK = 512


def read_chat_session(record: Record, names: BlockNames) -> Session:
    """The one-call session of one line; UserError where a field is wrong."""
    input_tokens = record.count("input_length", least=1)
    full_blocks, tail_tokens = divmod(input_tokens, CHAT_BLOCK)
    hash_ids = record.items("hash_ids")
    if not all(type(value) is int and value >= 0 for value in hash_ids):
        raise record.wrong("hash_ids", "a list of whole numbers of 0 or more")
    if len(hash_ids) != full_blocks + (tail_tokens > 0):
        right = (
            f"{len(hash_ids)} blocks of {CHAT_BLOCK} tokens as in hash_ids, the last may be short"
        )
        raise record.wrong("input_length", right)
    session_id = f"request_{record.line}"
    tail = (
        names.block("mooncake", hash_ids[-1]) if tail_tokens else names.block("tail", record.line)
    )
    call = Call(
        blocks=_block_runs([names.block("mooncake", local) for local in hash_ids[:full_blocks]]),
        tail_block=tail,
        input_tokens=input_tokens,
        output_tokens=record.count("output_length"),
        think_time_s=0.0,
        api_time_s=None,
    )
    return Session(session_id, (call,), record.seconds("timestamp") / 1000)


def _block_runs(ids: list[int]) -> tuple[BlockRun, ...]:
    runs: list[BlockRun] = []
    for block in ids:
        if runs and block == runs[-1].first + runs[-1].count:
            runs[-1] = BlockRun(runs[-1].first, runs[-1].count + 1)
        else:
            runs.append(BlockRun(block, 1))
    return tuple(runs)


SHIPPED_TRACE = Path(__file__).parent / "traces" / "claude-code-64k.jsonl.gz"


def load_trace(path: Path = SHIPPED_TRACE) -> Trace:
    """All sessions of `path`; UserError (file, line, field, what is right) if anything is wrong."""
    names = BlockNames()
    sessions: list[Session] = []
    block_tokens: int | None = None
    for number, text in text_lines(path):
        record = Record.parse(path, number, text)
        if "requests" in record.values:
            found = CODING_BLOCK
            sessions.extend(read_sessions(record, names))
        elif "hash_ids" in record.values:
            found = CHAT_BLOCK
            sessions.append(read_chat_session(record, names))
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
