"""The node as plain text, once: for scripts, mails and terminals that cannot do more."""

from __future__ import annotations

from collections.abc import Sequence

from hisparsed.tui.glyphs import ASCII
from hisparsed.tui.model import NodeModel
from hisparsed.tui.styled import Line, ascii_line
from hisparsed.tui.views.context import ViewContext
from hisparsed.tui.views.decisions import entry_line, moves
from hisparsed.tui.views.fleet import fleet_line, fleet_titles, worst_first
from hisparsed.tui.views.header import Banner, header_lines
from hisparsed.tui.views.overview import overview_lines

_HEIGHT = 26
_ENTRIES = 8


def text_page(model: NodeModel, width: int, context: ViewContext) -> str:
    """Header, overview and the latest decisions, ending in a newline; one line of a lost node."""
    if model.status is None:
        return f"{model.label}: {model.link}: {model.link_why}\n"
    lines = [
        *header_lines(model, Banner(), width, context),
        *overview_lines(model, min(width, 100), _HEIGHT, context),
        *(entry_line(model, one, context) for one in moves(model, _ENTRIES)),
    ]
    return _text(lines, context)


def text_fleet(models: Sequence[NodeModel], width: int, context: ViewContext) -> str:
    """A line a node, worst first."""
    lines = [fleet_line(model, width, context) for model in worst_first(models)]
    return f"{fleet_titles(width)}\n{_text(lines, context)}"


def _text(lines: Sequence[Line], context: ViewContext) -> str:
    if context.glyphs is ASCII:
        lines = [ascii_line(one) for one in lines]
    return "".join(f"{one.plain.rstrip()}\n" for one in lines)
