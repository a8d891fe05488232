"""Reads recorded coding-agent sessions (one session a line) into the trace model.

A nested subagent becomes a session of its own, `parent/agent`: it ran beside its parent on a prompt
of its own, and the parent's next pause already covers it. Block ids are local to a line; sessions
whose tool and system prompts have equal sizes are taken to share those blocks.
"""

from collections.abc import Iterator

from hisparsed.replay.model import BlockNames, BlockRun, Call, Session
from hisparsed.replay.records import Record

BLOCK_TOKENS = 64


def read_sessions(record: Record, names: BlockNames) -> Iterator[Session]:
    """The session of one line and then its subagents; UserError where a field is wrong."""
    if record.count("block_size") != BLOCK_TOKENS:
        raise record.wrong("block_size", str(BLOCK_TOKENS))
    trace_id = record.text("id")
    requests = record.children("requests")
    own = [item for item in requests if item.values.get("type") != "subagent"]
    if own:
        yield _session(record, trace_id, trace_id, 0.0, own, names)
    for item in requests:
        if item.values.get("type") == "subagent":
            session_id = f"{trace_id}/{item.text('agent_id')}"
            calls = item.children("requests")
            yield _session(item, trace_id, session_id, item.seconds("t"), calls, names)


def _session(
    owner: Record,
    trace_id: str,
    session_id: str,
    start_s: float,
    requests: list[Record],
    names: BlockNames,
) -> Session:
    tools, system = owner.count("tool_tokens"), owner.count("system_tokens")
    local_runs = [_local_runs(request) for request in requests]
    shared = _SharedPrefix(f"shared {tools} {system}", (tools + system) // BLOCK_TOKENS)
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
    if blocks != request.count("in", least=1) // BLOCK_TOKENS:
        raise request.wrong("in", f"{blocks} full blocks of {BLOCK_TOKENS} tokens as in hash_runs")
    return runs


class _SharedPrefix:
    """The leading blocks of a session that other sessions with the same prompts also have.

    Learned from the first call, so a later call that starts differently keeps ids of its own.
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
