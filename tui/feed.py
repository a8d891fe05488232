"""Where a node's updates come from: ``Feed`` is the interface, ``LiveFeed`` that of a running node.

A live feed is one event stream, opened again with growing pauses when it ends. Data that the stream
does not carry (the past, the policy, the table of requests) is requested when needed, one request
at a time. Clock and sleep are passed in. ``NodeSession`` is one node as the application holds it:
its model, its feed, and a client to change it or a player of its journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hisparsed.tui import updates
from hisparsed.tui.client import NodeClient, Refused, Unreachable
from hisparsed.tui.history import SPAN_S
from hisparsed.tui.journal_player import JournalPlayer
from hisparsed.tui.journal_reader import JournalReader
from hisparsed.tui.model import NodeModel
from hisparsed.tui.updates import Update
from hisparsed.tui.wire import Document, dig, items, number, parse_object


class Feed(Protocol):
    """Updates of a node, live or recorded."""

    want_requests: bool

    async def run(self) -> None: ...

    async def tick(self, entry: Document) -> Document: ...

    def refresh_requests(self) -> None: ...

    def refresh_policy(self) -> None: ...

    def refresh_decisions(self, lever: str | None, code: str | None) -> None: ...


@dataclass(frozen=True, slots=True)
class NodeSession:
    """``client`` is ``None`` for a recorded journal, ``player`` for a running node."""

    model: NodeModel
    make_feed: Callable[[Callable[[Update], None]], Feed]
    client: NodeClient | None = None
    player: JournalPlayer | None = None


OnUpdate = Callable[[updates.Update], None]
Part = tuple[str, dict[str, str | float], Callable[[Document], updates.Update]]

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 5.0
_TIMEOUT_S = 15.0
_DECISIONS = 200
_EVERY_TICK = 1_000
_LOG_LINES = 500
_NO_TICKS_AFTER = "engine-"
"""Kinds of events after which there may be no tick for a while, and so no status."""


class LiveFeed:
    """``run`` until cancelled; ``on_update`` gets every update in the event loop's thread."""

    def __init__(
        self,
        client: NodeClient,
        on_update: OnUpdate,
        *,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self.client = client
        self.want_requests = False
        """Whether the table of requests is shown."""
        self._on_update = on_update
        self._sleep = sleep
        self._timeout_s = timeout_s
        self._policy_mark: object = None
        self._asking_requests: asyncio.Task[None] | None = None
        self._asking_policy: asyncio.Task[None] | None = None
        self._policy_asked_again = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        pause_s = FIRST_PAUSE_S
        try:
            while True:
                heard = False
                try:
                    async with self.client.events(timeout_s=self._timeout_s) as events:
                        async for kind, data in events:
                            if not heard:
                                heard, pause_s = True, FIRST_PAUSE_S
                                self._on_update(updates.Connected())
                                self._policy_mark = None
                                self._start(self._catch_up())
                            self._take(kind, data)
                    why = "the daemon ended the stream; it is stopping"
                except (Unreachable, Refused) as error:
                    why = str(error)
                self._on_update(updates.Lost(why))
                await self._sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, pause_s * 2)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def refresh_requests(self) -> None:
        """Request the table of requests now, unless a request for it is open."""
        if self._asking_requests is None or self._asking_requests.done():
            self._asking_requests = self._start(self._ask_requests())

    def refresh_policy(self) -> None:
        """Request the policy; if a request is open, again after it."""
        if self._asking_policy is not None and not self._asking_policy.done():
            self._policy_asked_again = True
            return
        self._asking_policy = self._start(self._ask_policy())

    async def tick(self, entry: Document) -> Document:
        """The whole tick of a flat decision. Raises ``Refused`` and ``Unreachable``."""
        at = number(entry, "at_unix_s") or 0.0
        return await self.client.get(f"/v1/decisions/{entry.get('sequence')}", at=at)

    def refresh_decisions(self, lever: str | None, code: str | None) -> None:
        """Request every tick that fits, not only changes."""
        self._start(self._ask_decisions({"lever": lever, "code": code}))

    async def _ask_decisions(self, query: dict[str, str | None]) -> None:
        given = {name: value for name, value in query.items() if value is not None}
        with contextlib.suppress(Unreachable, Refused):
            document = await self.client.get("/v1/decisions", limit=_EVERY_TICK, **given)
            self._on_update(_decisions(document))

    def _start(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _take(self, kind: str, data: str) -> None:
        try:
            update = _update_of(kind, data)
        except ValueError:
            return  # a kind or a form of a later version
        if update is None:
            return
        self._on_update(update)
        if isinstance(update, updates.StatusUpdate):
            mark = _policy_mark(update.document)
            if mark != self._policy_mark:
                self._policy_mark = mark
                self.refresh_policy()
            if self.want_requests:
                self.refresh_requests()
        elif isinstance(update, updates.EventUpdate):
            # Overrides come and go with an event and without a new generation.
            self.refresh_policy()
            if any(str(one.get("kind")).startswith(_NO_TICKS_AFTER) for one in update.events):
                self._start(self._ask_status())

    async def _catch_up(self) -> None:
        """Events and decisions from before the stream; parts that this node does not have are
        omitted."""
        for path, query, wrap in past_parts(history_s=SPAN_S):
            try:
                document = await self.client.get(path, **query)
            except Refused:
                continue
            except Unreachable:
                return
            self._on_update(wrap(document))

    async def _ask_status(self) -> None:
        with contextlib.suppress(Unreachable, Refused):
            self._on_update(updates.StatusUpdate(await self.client.get("/v1/status")))

    async def _ask_policy(self) -> None:
        again = True
        while again:
            self._policy_asked_again = False
            try:
                self._on_update(updates.PolicyUpdate(await self.client.get("/v1/policy")))
            except (Unreachable, Refused):
                self._policy_mark = None  # the next status asks again
                return
            again = self._policy_asked_again

    async def _ask_requests(self) -> None:
        try:
            self._on_update(updates.RequestUpdate(await self.client.get("/v1/requests")))
        except Refused as error:
            why = "this node has no table of requests" if error.status == 404 else str(error)
            self._on_update(updates.RequestUpdate(None, why))
        except Unreachable as error:
            self._on_update(updates.RequestUpdate(None, str(error)))


def past_parts(*, history_s: float) -> Sequence[Part]:
    """The single requests, and how to apply their answers. The policy is requested by its mark."""
    return (
        ("/v1/history", {"span_s": history_s}, updates.HistoryUpdate),
        ("/v1/decisions", {"limit": _DECISIONS, "notable": "true"}, _decisions),
        ("/v1/journal/events", {"limit": _DECISIONS}, _events),
        ("/v1/logs", {"limit": _LOG_LINES}, _logs),
        ("/v1/policy/keys", {}, updates.KeyUpdate),
    )


def _update_of(kind: str, data: str) -> updates.Update | None:
    if kind == "status":
        return updates.StatusUpdate(parse_object(data))
    if kind == "event":
        return updates.EventUpdate([parse_object(data)])
    if kind in ("decisions", "logs"):
        found = items({kind: json.loads(data)}, kind)
        return updates.DecisionUpdate(found) if kind == "decisions" else updates.LogUpdate(found)
    return None


def _policy_mark(status: Document) -> object:
    return (number(status, "policy.generation"), json.dumps(dig(status, "policy"), sort_keys=True))


def _decisions(document: Document) -> updates.Update:
    return updates.DecisionUpdate(items(document, "decisions"))


def _events(document: Document) -> updates.Update:
    return updates.EventUpdate(items(document, "events"))


def _logs(document: Document) -> updates.Update:
    return updates.LogUpdate(items(document, "lines"))


def live_session(client: NodeClient) -> NodeSession:
    """A running node."""
    address = client.address
    model = NodeModel(address.label, str(address), named=address.named)
    return NodeSession(model, lambda on_update: LiveFeed(client, on_update), client=client)


def journal_session(reader: JournalReader, label: str) -> NodeSession:
    """A recorded node; nothing can be changed."""
    player = JournalPlayer(reader, clock=time.monotonic)
    return NodeSession(NodeModel(label), player.start, player=player)
