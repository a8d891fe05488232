"""Reading traces: what the formats mean, and that every defect is named."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from hisparsed.errors import UserError
from hisparsed.replay.trace import Trace, block_ids, load_trace


def request(t: float, tokens: int, runs: list[list[int]], **more: Any) -> dict[str, Any]:
    fields = {"t": t, "type": "n", "in": tokens, "out": 10, "hash_runs": runs}
    return fields | {"api_time": 2.0, "think_time": 3.0} | more


def line(trace_id: str, requests: list[dict[str, Any]], tool_tokens: int = 100) -> dict[str, Any]:
    sizes = {"tool_tokens": tool_tokens, "system_tokens": 28}
    return {"id": trace_id, "block_size": 64, "requests": requests} | sizes


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_bytes(gzip.compress("".join(json.dumps(item) + "\n" for item in lines).encode()))
    return path


def blocks(trace: Trace, session: int, call: int) -> list[int]:
    return list(block_ids(trace.sessions[session].calls[call].blocks))


def test_the_shipped_trace_is_complete_and_chained() -> None:
    trace = load_trace()
    assert (len(trace.sessions), sum(len(s.calls) for s in trace.sessions)) == (63, 989)
    before: dict[int, int] = {}
    for session in trace.sessions:
        for call in session.calls:
            assert sum(run.count for run in call.blocks) == call.input_tokens // 64
            previous = -1
            for block in block_ids(call.blocks):
                assert before.setdefault(block, previous) == previous
                previous = block


def test_sessions_with_equal_prompt_sizes_share_only_those_blocks(tmp_path: Path) -> None:
    calls = [request(0, 300, [[1, 4]])]
    trace = load_trace(write(tmp_path / "t.gz", [line("a", calls), line("b", calls)]))
    assert blocks(trace, 0, 0)[:2] == blocks(trace, 1, 0)[:2]
    assert set(blocks(trace, 0, 0)[2:]).isdisjoint(blocks(trace, 1, 0)[2:])
    other = load_trace(write(tmp_path / "o.gz", [line("a", calls), line("b", calls, 101)]))
    assert set(blocks(other, 0, 0)).isdisjoint(blocks(other, 1, 0))


def test_a_call_that_starts_differently_keeps_its_own_blocks(tmp_path: Path) -> None:
    calls = [request(0, 300, [[1, 4]]), request(9, 300, [[1, 1], [50, 3]])]
    trace = load_trace(write(tmp_path / "t.gz", [line("a", calls)]))
    first, second = blocks(trace, 0, 0), blocks(trace, 0, 1)
    assert first[0] == second[0]
    assert set(first[1:]).isdisjoint(second[1:])


def test_think_time_uses_starts_where_a_duration_is_missing(tmp_path: Path) -> None:
    calls = [
        request(0, 64, [[1, 1]], api_time=None),
        request(10, 64, [[1, 1]], think_time=9.0),
        request(20, 64, [[1, 1]], think_time=7.5),
        request(31, 64, [[1, 1]], think_time=None),
    ]
    trace = load_trace(write(tmp_path / "t.gz", [line("a", calls)]))
    assert [call.think_time_s for call in trace.sessions[0].calls] == [0.0, 10.0, 7.5, 9.0]


def test_subagents_become_sessions_that_share_their_own_prompt(tmp_path: Path) -> None:
    def agent(name: str, runs: list[list[int]]) -> dict[str, Any]:
        sizes = {"tool_tokens": 64, "system_tokens": 0, "t": 12.5}
        calls = [request(0, 130, runs)]
        return {"type": "subagent", "agent_id": name, "requests": calls} | sizes

    own = request(0, 64, [[1, 1]])
    requests = [
        own,
        agent("x", [[90, 2]]),
        agent("y", [[90, 1], [95, 1]]),
        request(60, 64, [[1, 1]]),
    ]
    trace = load_trace(write(tmp_path / "t.gz", [line("a", requests)]))
    assert [(s.id, len(s.calls), s.start_s) for s in trace.sessions] == [
        ("a", 2, 0.0),
        ("a/x", 1, 12.5),
        ("a/y", 1, 12.5),
    ]
    assert blocks(trace, 1, 0)[0] == blocks(trace, 2, 0)[0]
    assert blocks(trace, 1, 0)[1] != blocks(trace, 2, 0)[1]


def test_chat_requests_share_blocks_and_keep_arrivals(tmp_path: Path) -> None:
    chat = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 1024, "output_length": 0, "hash_ids": [0, 9]},
    ]
    trace = load_trace(write(tmp_path / "m.gz", chat))
    assert (trace.block_tokens, [s.start_s for s in trace.sessions]) == (512, [0.0, 3.0])
    assert (len(blocks(trace, 0, 0)), len(blocks(trace, 1, 0))) == (2, 2)
    assert blocks(trace, 0, 0)[0] == blocks(trace, 1, 0)[0]
    assert blocks(trace, 0, 0)[1] != blocks(trace, 1, 0)[1]


GOOD = line("a", [request(0, 64, [[1, 1]])])


def changed(**values: Any) -> dict[str, Any]:
    return line("a", [request(0, 64, [[1, 1]]), request(5, 64, [[1, 1]]) | values])


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (changed(**{"in": "many"}), ["requests[1].in", "'many'", "whole number"]),
        (changed(**{"in": 900}), ["requests[1].in", "900", "1 full blocks"]),
        (changed(out=-1), ["requests[1].out", "-1"]),
        (changed(api_time=True), ["requests[1].api_time", "True"]),
        (changed(hash_runs=[[1]]), ["requests[1].hash_runs", "pairs"]),
        (changed(hash_runs=[]), ["requests[1].hash_runs", "not empty"]),
        (line("b", []), ["requests", "not empty"]),
        (GOOD, ["two sessions", "'a'"]),
        ({"id": "b", "requests": [1], "block_size": 64}, ["position 0", "object"]),
        (GOOD | {"block_size": 16}, ["block_size", "16", "need 64"]),
        ({"question": 1}, ["question", "`hash_ids`"]),
        (
            {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]},
            ["512", "one format"],
        ),
        (
            {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1, 2]},
            ["input_length", "2 blocks of 512"],
        ),
    ],
)
def test_a_wrong_field_is_named_with_its_line(
    tmp_path: Path, second: dict[str, Any], words: list[str]
) -> None:
    path = write(tmp_path / "trace.gz", [GOOD, second])
    with pytest.raises(UserError) as error:
        load_trace(path)
    message = str(error.value)
    assert "trace.gz" in message
    assert "two sessions" in message or "line 2" in message
    assert [word for word in words if word not in message] == []


def test_a_torn_gzip_is_named(tmp_path: Path) -> None:
    whole = write(tmp_path / "t.gz", [line(f"s{n}", [request(0, 64, [[1, 1]])]) for n in range(99)])
    whole.write_bytes(whole.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"t\.gz: line \d+: the gzip data is torn.*fetch it again"):
        load_trace(whole)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"id": \n', "line 1: not JSON at column"),
        (b"[1]\n", "line 1: .* is not a JSON object"),
        (b"\n\n", "the file is empty"),
        (b"\xff\xfe\xfd\n", "line 1: not UTF-8"),
        (b"\x1f\x8bnot gzip at all", "line 1: the gzip data is torn"),
    ],
)
def test_a_file_that_is_no_trace_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"bad\.jsonl: {words}"):
        load_trace(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.gz: cannot read the file: No such file"):
        load_trace(tmp_path / "none.gz")
