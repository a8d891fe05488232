"""Starts the view that was asked for: the application on nodes or on a recorded journal."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

from hisparsed.tui.app import TopApp
from hisparsed.tui.client import NodeClient
from hisparsed.tui.journal_player import JournalPlayer
from hisparsed.tui.journal_reader import JournalReader
from hisparsed.tui.live_feed import LiveFeed
from hisparsed.tui.model import NodeModel
from hisparsed.tui.options import TopOptions
from hisparsed.tui.session import NodeSession


def live_session(client: NodeClient) -> NodeSession:
    """A running node."""
    model = NodeModel(client.address.label, str(client.address))
    return NodeSession(model, lambda tell: LiveFeed(client, tell), client=client)


def journal_session(reader: JournalReader, label: str) -> NodeSession:
    """A recorded node; nothing can be changed."""
    player = JournalPlayer(reader, clock=time.monotonic)
    return NodeSession(NodeModel(label), player.start, player=player)


def run_app(options: TopOptions) -> int:
    """Until the operator leaves. Raises ``ViewError`` when a journal cannot be read."""
    return asyncio.run(_run(options))


async def _run(options: TopOptions) -> int:
    async with AsyncExitStack() as held:
        if options.journal is not None:
            reader = JournalReader(options.journal)
            held.callback(reader.close)
            sessions = [journal_session(reader, options.journal.stem)]
        else:
            sessions = [
                live_session(await held.enter_async_context(NodeClient(address)))
                for address in options.addresses
            ]
        app = TopApp(
            sessions,
            readonly=options.readonly,
            theme=options.theme,
            ascii_only=options.ascii_only,
            no_color=options.no_color,
        )
        await app.run_async()
        return app.return_code or 0
