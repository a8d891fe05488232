"""A control side that gets bad documents and calls, and all views of its state.

The functions are those that `policy check`, the file watch and the control API call. A fault is
reported in words: a traceback, an answer of 500, text that cannot be printed, a view that fails, or
two judges that do not agree.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "control"))

from control_node import Node

from hisparsed.cli.policy import check
from hisparsed.config.node import NodeConfig, load_node_config
from hisparsed.control.api.app import ControlApi
from hisparsed.control.api.views import ApiViews
from hisparsed.control.file_watch import NodeFile
from hisparsed.control.status.history import History
from hisparsed.control.text.policy import judgement_text, policy_text
from hisparsed.control.text.status import status_page
from hisparsed.errors import UserError
from hisparsed.logs.ring import LogRing
from hisparsed.node.engine.values import EngineValues
from hisparsed.policy.keys import leaves
from hisparsed.policy.problems import ConfigError
from hisparsed.tui import updates
from hisparsed.tui.model import NodeModel
from hisparsed.tui.once import text_page
from hisparsed.tui.views.drawing import ViewContext
from hisparsed.tui.views.policy import lever_lines, policy_row_line, policy_rows, summary_lines

_ANY_MEMORY = 2**62
_PAGES = ("/v1/status", "/v1/policy", "/v1/decisions", "/v1/journal/events")
_SHOWN = 300


class Fault(Exception):  # noqa: N818 (what is looked for)
    """The finding, in words."""


class ControlSide:
    """``await open`` first, ``close`` at last."""

    def __init__(self, folder: Path) -> None:
        self.node = Node(folder)
        node = self.node
        views = ApiViews(node.journal, node.broadcast, LogRing(), History())
        node.on_tick.append(views.watch)
        api = ControlApi(
            node.current, node.operator, node.source, node.journal, node.broadcast, views.routes()
        )
        transport = httpx.ASGITransport(app=api.application(), raise_app_exceptions=False)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://node")
        self.accepted = 0
        self.rejected = 0

    async def open(self) -> None:
        self.node.journal.start()
        await self.node.loop.start()

    async def close(self) -> None:
        """Raises ``Fault`` when something was not written down."""
        await self._http.aclose()
        self.node.journal.close()
        health = self.node.journal.health
        if health.error is not None or health.dropped:
            raise Fault(f"the journal: {health}")

    async def take(self, document: bytes) -> None:
        """One document by all ways into the daemon. Raises ``Fault``."""
        self.node.policy_path.write_bytes(document)
        said = _checked(self.node.policy_path)
        before = self.node.source.active.generation
        with _told("the file watch"):
            self.node.operator.reload_if_changed()
        loaded = self.node.source.rejection is None
        self._count(loaded)
        if not loaded:
            _rejection(self.node.source.last_error or "")
        elif said is not None:
            raise Fault(f"the watch takes what `policy check` refuses: {said}")
        with contextlib.suppress(UnicodeDecodeError):
            text = document.decode("utf-8-sig")
            body = json.dumps({"document": text}).encode()
            answer = await self._ask("POST", "/v1/policy/check", body)
            if answer["ok"] is not loaded:
                raise Fault(f"the watch says {loaded}, the control API {answer}")
            _printed(judgement_text("x", answer, node="here", not_compared=""))
        if self.node.source.active.generation != before:
            await self.look()

    async def call(self, method: str, path: str, body: bytes) -> None:
        """One call of the control API. Raises ``Fault``."""
        before = self.node.source.active.generation
        await self._ask(method, path, body)
        if self.node.source.active.generation != before:
            await self.look()

    async def look(self) -> None:
        """A tick, and every view of its result. Raises ``Fault``."""
        with _told("a tick"):
            await self.node.ticks(1)
        pages: dict[str, Any] = {}
        for path in _PAGES:
            answer = await self._http.get(path)
            if answer.status_code != 200:
                raise Fault(f"{path}: {answer.status_code} {answer.text[:_SHOWN]}")
            pages[path] = answer.json()
        with _told("the text pages"):
            _printed(status_page(self.node.current.status()))
            _printed(policy_text(pages["/v1/policy"], now_unix_s=0.0, every=True))
            list(self.node.metrics.collect())
        with _told("the terminal view"):
            _printed(_terminal(pages))

    def _count(self, loaded: bool) -> None:
        self.accepted += loaded
        self.rejected += not loaded

    async def asked(self, method: str, path: str, body: bytes) -> httpx.Response:
        return await self._http.request(method, path, content=body)

    async def _ask(self, method: str, path: str, body: bytes) -> Any:
        answer = await self.asked(method, path, body)
        if answer.status_code >= 500:
            raise Fault(f"{path} {body[:_SHOWN]!r}: {answer.status_code} {answer.text[:_SHOWN]}")
        _printed(answer.text)
        return answer.json()


def take_node_document(path: Path, running: NodeConfig) -> bool:
    """Whether it was accepted; by a start, the doctor and the watch. Raises ``Fault``."""
    with _told("the node's document"):
        NodeFile(path, running, _Silent(), load=_load).look()  # type: ignore[arg-type]
        try:
            config = _load(path)
        except ConfigError as error:
            _printed(error.render() + str(error))
            return False
        _printed("".join(key.text(config) for key in leaves(NodeConfig)))
        values = EngineValues(config, 4.0)
        values.digest()
        json.dumps(values.document(), ensure_ascii=False).encode()
        with contextlib.suppress(UserError):
            _start(config)
        return True


def _load(path: Path) -> NodeConfig:
    return load_node_config(path, memory_bytes=_ANY_MEMORY).value


def _start(config: NodeConfig) -> None:
    from hisparsed.engine.reference import launch

    launch.require_startable(config, max_multiplier=4.0)


class _Silent:
    def event(self, _: object, sentence: str, **__: object) -> None:
        _printed(sentence)
        if "bug in the daemon" in sentence:
            raise Fault(sentence)


def _checked(path: Path) -> str | None:
    """What `policy check` prints of a document that it refuses; ``None`` for a good one."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
    with _told("policy check"), contextlib.redirect_stdout(out):
        try:
            check(path, offline=True)
        except ConfigError as error:
            _printed(error.render())
            return error.render()
        except typer.Exit:
            out.flush()
            return out.buffer.getvalue().decode()  # type: ignore[attr-defined,no-any-return]
    return None


def _rejection(why: str) -> None:
    _printed(why)
    if "bug in the daemon" in why or not why:
        raise Fault(why or "a rejection without a reason")


def _terminal(pages: dict[str, Any]) -> str:
    model, context = NodeModel("fuzz", "fuzz"), ViewContext(now_s=pages["/v1/status"]["at_unix_s"])
    model.apply(updates.Connected(), 0.0)
    model.apply(updates.PolicyUpdate(pages["/v1/policy"]), 0.0)
    model.apply(updates.StatusUpdate(pages["/v1/status"]), 0.0)
    lines = [
        *lever_lines(model, 80, context),
        *summary_lines(model, 80, context),
        *(policy_row_line(model, row, 80) for row in policy_rows(model)),
    ]
    return text_page(model, 80, context) + "\n".join(line.plain for line in lines)


def _printed(text: str) -> None:
    """Raises ``Fault`` for text that a terminal or UTF-8 does not take as it is."""
    odd = sorted({one for one in text if not one.isprintable() and one not in "\n\t"})
    if odd:
        raise Fault(f"text with {odd}: {text[:_SHOWN]!r}")


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except Fault:
        raise
    except Exception:
        raise Fault(f"{what}: {traceback.format_exc()}") from None
