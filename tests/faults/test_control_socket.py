"""The control socket: removed while it serves, taken by others, and clients that are slow on it."""

from __future__ import annotations

import asyncio
import shutil
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from edge import LONG_S, Client, request

from hisparsed.control.api.http_server import Cut, HttpLimits
from hisparsed.control.api.socket import ControlServer
from hisparsed.errors import UserError
from hisparsed.policy.events import EventKind

SHORT = HttpLimits(connections=8, header_s=0.1, body_s=0.1)


class Control:
    """A control server with its own folder; ``heard`` has the operator's events."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run" / "control.sock"
        self.heard: list[tuple[EventKind, str]] = []
        self.news = asyncio.Semaphore(0)
        self.clients: list[Client] = []
        self.server = self.make()

    def make(self) -> ControlServer:
        return ControlServer(
            self._application,
            self.path,
            end_streams=lambda: None,
            report=self._report,
            limits=SHORT,
            look_every_s=0.005,
        )

    def _report(self, kind: EventKind, sentence: str) -> None:
        self.heard.append((kind, sentence))
        self.news.release()

    async def reported(self) -> tuple[EventKind, str]:
        """The next bytes."""
        async with asyncio.timeout(LONG_S):
            await self.news.acquire()
        return self.heard[-1]

    async def client(self) -> Client:
        client = Client(*await asyncio.open_unix_connection(self.path))
        self.clients.append(client)
        return client

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        await self.server.stop()

    async def ask(self, client: Client | None = None) -> int:
        asked = client or await self.client()
        await asked.send(request(path="/v1/status"))
        answer = await asked.answer()
        return answer.status

    async def _application(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        while message.get("more_body"):
            message = await receive()
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture
async def control(tmp_path: Path) -> AsyncIterator[Control]:
    served = Control(tmp_path)
    await served.server.start()
    yield served
    await served.close()


def remove_the_file(control: Control) -> None:
    control.path.unlink()


def remove_the_folder(control: Control) -> None:
    shutil.rmtree(control.path.parent)


@pytest.mark.parametrize("remove", [remove_the_file, remove_the_folder])
async def test_a_socket_that_was_removed_is_there_again_and_an_event_tells(
    control: Control, remove: Callable[[Control], None]
) -> None:
    before = await control.client()
    assert await control.ask(before) == 200
    remove(control)
    kind, sentence = await control.reported()
    assert kind is EventKind.CONTROL_SOCKET_BACK
    assert str(control.path) in sentence
    assert stat.S_IMODE(control.path.stat().st_mode) == 0o660
    assert await control.ask() == 200
    assert await control.ask(before) == 200, "connections from before go on"
    with pytest.raises(UserError, match="another hisparsed serves"):
        await control.make().start()


async def test_it_is_made_anew_as_often_as_it_is_removed(control: Control) -> None:
    for _ in range(5):
        control.path.unlink()
        await control.reported()
        assert await control.ask() == 200
    await control.server.stop()
    assert not control.path.exists()


async def test_something_else_in_its_place_is_left_alone_until_it_goes(control: Control) -> None:
    control.path.unlink()
    control.path.write_text("precious", encoding="utf-8")
    kind, sentence = await control.reported()
    assert kind is EventKind.CONTROL_SOCKET_LOST
    assert "is there and is not a socket" in sentence
    assert control.path.read_text("utf-8") == "precious"
    control.path.unlink()
    assert (await control.reported())[0] is EventKind.CONTROL_SOCKET_BACK
    assert len(control.heard) == 2, "told once, not at every look"
    assert await control.ask() == 200


async def test_another_daemon_on_its_path_is_not_pushed_aside(control: Control) -> None:
    remove_the_folder(control)
    control.path.parent.mkdir()
    other = await asyncio.start_unix_server(lambda r, w: w.close(), control.path)
    kind, sentence = await control.reported()
    assert kind is EventKind.CONTROL_SOCKET_LOST
    assert "another hisparsed serves" in sentence
    other.close()
    await control.server.stop()
    assert control.path.exists(), "a stopping daemon removes its own socket only"


async def test_headers_that_drip_on_the_control_socket_are_408(control: Control) -> None:
    client = await control.client()
    await client.send(b"GET /v1/status HTTP/1.1\r\nx: ")
    answer = await client.answer()
    assert (answer.status, answer.error["code"]) == (408, "request_timeout")
    assert control.server.connections.cut[Cut.SLOW_HEADERS] == 1
    assert await control.ask() == 200


async def test_a_body_that_drips_on_the_control_socket_is_408(control: Control) -> None:
    client = await control.client()
    await client.send(b"POST /v1/freeze HTTP/1.1\r\ncontent-length: 99\r\n\r\n{")
    assert (await client.answer()).status == 408


async def test_idle_connections_do_not_lock_operators_out(control: Control) -> None:
    for _ in range(5 * SHORT.connections):
        await control.client()
    assert await control.ask() == 200


@pytest.mark.parametrize("header", ["x-forwarded-for: 192.0.2.1", "x-forwarded-for: unix-user:x"])
async def test_no_header_says_who_connects(
    control: Control, header: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["client"])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    path = control.path.with_name("other.sock")
    server = ControlServer(application, path, end_streams=lambda: None)
    await server.start()
    client = Client(*await asyncio.open_unix_connection(path))
    await client.send(request(headers=(header,)))
    assert (await client.answer()).status == 204
    await client.close()
    await server.stop()
    assert seen[0][0].startswith("unix-user:")
    assert seen[0][0] != "unix-user:x"


async def test_whatever_goes_wrong_with_the_new_socket_it_is_tried_again(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = control.server._server
    assert serving is not None
    listen_on = serving.listen_on
    tries: list[Any] = []

    async def fails_once(listener: Any) -> None:
        tries.append(listener)
        if len(tries) == 1:
            listener.close()
            raise RuntimeError("no loop")
        await listen_on(listener)

    monkeypatch.setattr(serving, "listen_on", fails_once)
    control.path.unlink()
    kind, sentence = await control.reported()
    assert (kind, "no loop" in sentence) == (EventKind.CONTROL_SOCKET_LOST, True)
    assert (await control.reported())[0] is EventKind.CONTROL_SOCKET_BACK
    assert await control.ask() == 200


async def test_a_server_that_ends_by_itself_is_begun_again(control: Control) -> None:
    serving = control.server._serving
    assert serving is not None
    serving.cancel()
    kind, sentence = await control.reported()
    assert kind is EventKind.CONTROL_SOCKET_BACK
    assert "is no longer served (it ended unexpectedly); it was created again" in sentence
    assert await control.ask() == 200
