"""`hisparsed top --once` and `--json`: ask every node once, print plain text, and leave.

For a recorded journal, its end.

For scripts, mails and terminals that cannot do more. Imports no Textual.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from hisparsed.tui import updates
from hisparsed.tui.client import NodeClient, Refused
from hisparsed.tui.feed import Part, past_parts
from hisparsed.tui.journal_player import JournalPlayer
from hisparsed.tui.journal_reader import JournalReader
from hisparsed.tui.model import NodeModel
from hisparsed.tui.options import NodeAddress, TopOptions, ViewError
from hisparsed.tui.styled import Line, ascii_line
from hisparsed.tui.views.decisions import entry_line, moves
from hisparsed.tui.views.drawing import ASCII, UNICODE, ViewContext
from hisparsed.tui.views.fleet import fleet_line, fleet_titles, worst_first
from hisparsed.tui.views.header import Banner, header_lines
from hisparsed.tui.views.overview import overview_lines

_HEIGHT = 26
_ENTRIES = 8


def text_page(model: NodeModel, width: int, context: ViewContext) -> str:
    """Header, overview and the latest decisions, ending in a newline; one line of a lost node."""
    if model.status is None:
        return f"{model.name}: {model.link}: {model.link_why}\n"
    lines = [
        *header_lines(model, Banner(), width, context),
        *overview_lines(model, min(width, 100), _HEIGHT, context),
        *(entry_line(model, one, context) for one in moves(model, _ENTRIES)),
    ]
    return _text(lines, context)


def text_fleet(models: Sequence[NodeModel], width: int, context: ViewContext) -> str:
    """One line per node, worst first."""
    lines = [fleet_line(model, width, context) for model in worst_first(models)]
    return f"{fleet_titles(width)}\n{_text(lines, context)}"


def _text(lines: Sequence[Line], context: ViewContext) -> str:
    if context.glyphs is ASCII:
        lines = [ascii_line(one) for one in lines]
    return "".join(f"{one.plain.rstrip()}\n" for one in lines)


_PLAIN_WIDTH = 100
_HISTORY_S = 900
_POLICY: Part = ("/v1/policy", {}, updates.PolicyUpdate)


async def ask_once(client: NodeClient) -> NodeModel:
    """A model with the node's state; a node that cannot be reached is ``LOST``."""
    address = client.address
    model = NodeModel(address.label, str(address), named=address.named)
    try:
        status = await client.get("/v1/status")
    except ViewError as error:
        model.apply(updates.Lost(str(error)), time.time())
        return model
    model.apply(updates.Connected(), time.time())
    for path, query, wrap in (_POLICY, *past_parts(history_s=_HISTORY_S)):
        try:
            model.apply(wrap(await client.get(path, **query)), time.time())
        except Refused:
            continue
        except ViewError as error:
            model.apply(updates.Lost(str(error)), time.time())
            break
    model.apply(updates.StatusUpdate(status), time.time())
    return model


def print_once(options: TopOptions, *, as_json: bool) -> int:
    """The exit code: 0 when every node answered, 1 when some did, 2 when none did.

    Raises ``ViewError`` when a journal cannot be read.
    """
    if options.journal is not None:
        models = [_recorded(options.journal)]
    else:
        models = asyncio.run(_ask_all(options.addresses))
    answered = sum(model.status is not None for model in models)
    if as_json:
        _print(json.dumps([_document(model) for model in models], indent=2))
    else:
        _print(_page(options, models))
    return 0 if answered == len(models) else 1 if answered else 2


def _page(options: TopOptions, models: list[NodeModel]) -> str:
    width = shutil.get_terminal_size((_PLAIN_WIDTH, 24)).columns
    glyphs = ASCII if options.ascii_only else UNICODE
    now_s = time.time()
    if options.journal is not None:
        now_s = models[0].node_time_s or now_s
    context = ViewContext(glyphs, now_s, 900.0)
    if len(models) > 1:
        return text_fleet(models, max(width, 120), context).rstrip("\n")
    return text_page(models[0], max(80, min(width, 200)), context).rstrip("\n")


def _recorded(path: Path) -> NodeModel:
    """The end of a journal."""
    model = NodeModel(path.stem)
    with closing(JournalReader(path)) as reader:
        player = JournalPlayer(reader, clock=time.monotonic)
        player.start(lambda update: model.apply(update, player.end_s))
        model.apply(updates.Connected(), player.end_s)
        player.seek(player.end_s)
    return model


async def _ask_all(addresses: tuple[NodeAddress, ...]) -> list[NodeModel]:
    async def one(address: NodeAddress) -> NodeModel:
        async with NodeClient(address) as client:
            return await ask_once(client)

    return list(await asyncio.gather(*(one(address) for address in addresses)))


def _document(model: NodeModel) -> dict[str, Any]:
    severity = model.severity()
    return {
        "node": model.name,
        "address": model.address,
        "state": severity.word,
        "error": model.link_why or None,
        "status": model.status,
    }


def _print(text: str) -> None:
    print(text)  # noqa: T201 (the result)
