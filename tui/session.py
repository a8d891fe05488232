"""One node as the application holds it: its model, its news, and a way to ask and to change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hisparsed.tui.client import NodeClient
from hisparsed.tui.journal_player import JournalPlayer
from hisparsed.tui.model import NodeModel
from hisparsed.tui.updates import Update
from hisparsed.tui.wire import Document


class Feed(Protocol):
    """News of a node, live or recorded."""

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
