"""`hisparsed top` as a command: light to start, plain text and JSON, addresses, clear refusals."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from fake_node import FakeNode
from recorded_journal import BEGIN, write_journal
from recorded_node import recorded

from hisparsed.tui.model import NodeModel
from hisparsed.tui.once import text_fleet, text_page
from hisparsed.tui.options import ViewError, default_address, make_options, parse_address
from hisparsed.tui.views.drawing import ASCII, ViewContext


async def top(*arguments: str) -> tuple[int, str, str]:
    """Run the command to its end next to the node of this process."""
    environment = {name: value for name, value in os.environ.items() if name != "HISPARSED_SOCKET"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hisparsed", "top", *arguments,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, env={**environment, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_once_prints_the_page_as_text(node: FakeNode) -> None:
    code, out, _ = await top("--socket", str(node.path), "--once")
    assert code == 0
    for word in ("Node    healthy: ", "host memory 44.0 MiB", "6 running", "FROZEN: watermark"):
        assert word in out
    assert "\x1b" not in out


async def test_json_is_the_status_of_every_node(node: FakeNode, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone.sock")
    code, out, _ = await top("--node", f"a={node.path}", "--node", f"b={gone}", "--json")
    assert code == 1
    first, second = json.loads(out)
    assert first["node"] == "a"
    assert first["status"] == recorded("status")
    assert (second["state"], second["status"]) == ("disconnected", None)
    assert "no daemon has this socket" in second["error"]


async def test_several_nodes_are_a_line_each(node: FakeNode, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone.sock")
    code, out, _ = await top("--node", f"a={node.path}", "--node", f"b={gone}", "--once")
    assert code == 1
    assert [row.split()[0] for row in out.splitlines()] == ["node", "b", "a"]


async def test_no_daemon_is_said_and_ends_with_2(tmp_path: Path) -> None:
    code, out, _ = await top("--socket", str(tmp_path / "gone.sock"), "--once")
    assert code == 2
    assert out.startswith("gone: disconnected: ")
    assert "no daemon has this socket" in out


async def test_once_prints_the_end_of_a_recording(tmp_path: Path) -> None:
    write_journal(tmp_path / "node-7.sqlite", ticks=60)
    code, out, _ = await top("--journal", str(tmp_path / "node-7.sqlite"), "--once")
    assert code == 0
    assert out.startswith("node-7 ")
    assert "host memory 44.0 MiB" in out
    end = datetime.fromtimestamp(BEGIN + 59).strftime("%H:%M:%S")  # noqa: DTZ006 (as on the page)
    assert end in out
    code, out, _ = await top("--journal", str(tmp_path / "node-7.sqlite"), "--json")
    (document,) = json.loads(out)
    assert (code, document["status"]["observed"]["tick"]) == (0, 59)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--theme", "pink"], '--theme: "pink" is not known; use one of dark, light, colour-blind'),
        (["--journal", "nowhere.sqlite"], "--journal: no file nowhere.sqlite"),
        (["--journal", "x", "--node", "y"], "leave --node and --socket out"),
        (["--node", "x", "--socket", "y"], "use only one of them"),
        (["--node", "ftp://x"], "write http://HOST:PORT or a path"),
    ],
)
async def test_what_cannot_be_is_one_line_and_code_2(arguments: list[str], message: str) -> None:
    code, _, err = await top(*arguments)
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1


def test_the_application_imports_no_engine() -> None:
    code = (
        "import sys, hisparsed.cli.node, hisparsed.tui.app, hisparsed.tui.once\n"
        "heavy = {'torch', 'vllm', 'transformers', 'pydantic', 'numpy', 'yaml', 'uvicorn'}\n"
        "print(sorted(heavy & sys.modules.keys()))\n"
        "print(sorted(one for one in sys.modules if one.startswith('hisparsed.')"
        " and not one.startswith(('hisparsed.tui', 'hisparsed.cli'))))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines() == ["[]", str(PURE)]


PURE = [
    "hisparsed.policy",
    "hisparsed.policy.decisions",
    "hisparsed.policy.derived",
    "hisparsed.policy.events",
    "hisparsed.policy.forecasts",
    "hisparsed.policy.reach",
    "hisparsed.policy.signals",
]
"""What the TUI takes of the node's own code: figures and codes."""


def test_ascii_text_is_ascii(model: NodeModel) -> None:
    context = ViewContext(ASCII, model.node_time_s or 0.0)
    assert text_page(model, 100, context).isascii()
    assert text_fleet([model, model], 160, context).isascii()


def test_a_terminal_without_unicode_gets_ascii() -> None:
    for encoding, ascii_only in (("utf-8", False), ("UTF-8", False), ("latin-1", True)):
        options = make_options(
            [], socket=None, journal=None, readonly=False, theme="dark", ascii_only=False,
            environment={}, encoding=encoding,
        )  # fmt: skip
        assert options.ascii_only is ascii_only


@pytest.mark.parametrize(("value", "no_color"), [("1", True), ("", False)])
def test_no_color_leaves_colour_out(value: str, no_color: bool) -> None:
    options = make_options(
        [], socket=None, journal=None, readonly=False, theme="light", ascii_only=False,
        environment={"NO_COLOR": value}, encoding="utf-8",
    )  # fmt: skip
    assert options.no_color is no_color


def test_an_unknown_theme_is_refused() -> None:
    with pytest.raises(ViewError, match="pink"):
        make_options(
            [], socket=None, journal=None, readonly=False, theme="pink", ascii_only=False
        )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "label", "where"),
    [
        ("/run/hisparsed/control.sock", "hisparsed", "/run/hisparsed/control.sock"),
        ("unix:/srv/a.sock", "a", "/srv/a.sock"),
        ("gpu7=/run/x/control.sock", "gpu7", "/run/x/control.sock"),
        ("http://gpu8:9000/", "gpu8:9000", "http://gpu8:9000"),
        ("east=https://gpu8:9000", "east", "https://gpu8:9000"),
        ("/data/a=b/control.sock", "a=b", "/data/a=b/control.sock"),
        ("rack-1/gpu-7=/run/x/control.sock", "rack-1/gpu-7", "/run/x/control.sock"),
        ("eu/gpu:7=http://gpu7:9000", "eu/gpu:7", "http://gpu7:9000"),
        ("data/a=b.sock", "a=b", "data/a=b.sock"),
        ("./a=/b.sock", "b", "a=/b.sock"),
        ("http://gpu8:9000/?a=/b", "gpu8:9000", "http://gpu8:9000/?a=/b"),
    ],
)
def test_addresses(text: str, label: str, where: str) -> None:
    address = parse_address(text)
    assert (address.label, str(address)) == (label, where)


@pytest.mark.parametrize("text", ["", "x=", "http://", "ftp://host/x"])
def test_addresses_that_cannot_be(text: str) -> None:
    with pytest.raises(ViewError, match="--node"):
        parse_address(text)


def test_the_socket_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(default_address()) == "/run/hisparsed/control.sock"
    monkeypatch.setenv("HISPARSED_SOCKET", "/run/other.sock")
    assert str(default_address()) == "/run/other.sock"
