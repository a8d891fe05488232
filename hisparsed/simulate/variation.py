"""The node as it might also be: worse misses, wider unions, requests that differ. Pure."""

from __future__ import annotations

from hisparsed.config.node_description import NodeDescription
from hisparsed.errors import UserError


def parse_factor(option: str, text: str) -> float:
    """``x1.5`` or ``1.5`` as a factor. Raises ``UserError`` naming ``option``."""
    try:
        factor = float(text.removeprefix("x"))
    except ValueError:
        factor = 0.0
    if not 0 < factor <= 10:
        raise UserError(f"{option}: {text!r} is no factor; write one such as x1.5, up to x10")
    return factor


def varied(
    node: NodeDescription, *, misses: float, union: float, spread: float | None
) -> NodeDescription:
    """``misses`` and ``union`` times those of the description; ``spread`` of single requests,
    the description's where ``None``.

    No more rows miss than are selected, and no union exceeds its rows.
    """
    rows = node.rows
    curve = tuple((ratio, min(1.0, share * misses)) for ratio, share in rows.miss_curve)
    unions = tuple(
        min(float(count), max(1.0, share * union)) for count, share in enumerate(rows.union, 1)
    )
    changed: dict[str, object] = {"miss_curve": curve, "union": unions}
    if spread is not None:
        changed["spread"] = spread
    return node.model_copy(update={"rows": rows.model_copy(update=changed)})
