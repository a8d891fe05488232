"""`hisparsed replay` as an operator runs it, against a server on loopback."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import uvicorn
from typer.testing import CliRunner

from hisparsed.cli.traffic import replay
from hisparsed.errors import UserError
from hisparsed.replay.trace import load_trace

app = typer.Typer()
app.command()(replay)


@pytest.fixture
def url(endpoint: Any) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(endpoint.app, log_level="error", lifespan="off"))
    # The socket listens already, so requests wait for the server to come up.
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    listener.close()


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


LENGTH_LIMIT = 5000
SMALL = ("--scale", "1/32", "--sessions", "3", "--requests", "9", "--concurrency", "2")


def test_json_stands_alone_on_stdout_and_records_are_written(url: str, tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    result = run("--url", url, *SMALL, "--json", "--out", str(out))
    assert result.exit_code == 0
    summary = json.loads(result.stdout)
    assert (summary["requests"], summary["failed"], summary["preemptions"]) == (9, 0, 3)
    assert summary["tokens_in"] > summary["prefix_hit_tokens"] > 0
    records = [json.loads(text) for text in out.read_text().splitlines()]
    assert len({(record["session_id"], record["call_index"]) for record in records}) == 9
    assert "9/9 calls, 0 failed" in result.stderr


def test_the_endpoints_length_limit_is_used(url: str, endpoint: Any) -> None:
    result = run("--url", url, "--scale", "1/4", "--requests", "30", "--json")
    inputs = [call.input_tokens // 4 for s in load_trace().sessions for call in s.calls]
    assert json.loads(result.stdout)["dropped"] == sum(tokens >= LENGTH_LIMIT for tokens in inputs)
    lengths = [len(body["prompt"]) + body["max_tokens"] for _, _, body in endpoint.seen]
    assert len(lengths) == 30
    assert max(lengths) <= LENGTH_LIMIT


def test_a_person_gets_text(url: str) -> None:
    result = run("--url", f"{url}/v1/", *SMALL)
    assert result.stdout.startswith("Replayed 9 calls in ")


def test_failed_calls_give_exit_code_1(url: str, endpoint: Any) -> None:
    endpoint.answers = [(400, {})]
    result = run("--url", url, *SMALL)
    assert result.exit_code == 1
    assert "Failed: 1 (1 http_400)" in result.stdout


def test_interrupt_prints_a_partial_summary(url: str, endpoint: Any) -> None:
    def fifth(number: int) -> None:
        if number == 4:
            os.kill(os.getpid(), signal.SIGINT)

    endpoint.on_request = fifth
    result = run("--url", url, "--scale", "1/32", "--concurrency", "1", "--json")
    assert result.exit_code == 130
    summary = json.loads(result.stdout)
    assert summary["stopped_by"] == "interrupted"
    assert 4 <= summary["requests"] < 989


def test_a_dry_run_needs_no_endpoint() -> None:
    size = json.loads(run("--dry-run", "--json", "--scale", "1/16").stdout)
    assert (size["sessions"], size["calls"], size["max_input_tokens"]) == (63, 989, 4091)


def refused(*arguments: str) -> str:
    result = run(*arguments)
    assert isinstance(result.exception, UserError), result.output
    return str(result.exception)


def test_wrong_input_is_named(url: str, tmp_path: Path) -> None:
    for address in ("ftp://x", "http://", "127.0.0.1:8000", "http://[::1", "http://x:99999"):
        assert f"--url: '{address}' is not right" in refused("--url", address)
    assert "it serves small" in refused("--url", url, "--model", "big")
    assert "--rate: 0.0 is not right" in refused("--dry-run", "--rate", "0")
    assert "give one of them" in refused("--dry-run", "--rate", "1", "--recorded-starts")
    assert "--prompt-format: 'words'" in refused("--dry-run", "--prompt-format", "words")
    assert "missing/o: No such file" in refused("--url", url, "--out", str(tmp_path / "missing/o"))


def test_an_endpoint_that_is_not_there_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        message = refused("--url", address)
    assert address in message
    assert "hisparsed serve" in message
