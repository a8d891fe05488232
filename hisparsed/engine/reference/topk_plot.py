"""The plot of the top-k study as SVG text: two panels, no libraries."""

from __future__ import annotations

from collections.abc import Mapping

_WIDTH, _HEIGHT, _MARGIN = 360, 260, 48
_STYLE = (
    "text{font:12px sans-serif;fill:#333}.axis{stroke:#888}.grid{stroke:#ddd}"
    ".measured{fill:none;stroke:#1b6ca8;stroke-width:2}.dot{fill:#1b6ca8}"
    ".below{fill:none;stroke:#d1495b}.above{fill:none;stroke:#2e8b57}.bar{fill:#1b6ca8}"
)


def plot_svg(
    misses: Mapping[float, float],
    predicted_below: Mapping[float, float],
    predicted_above: Mapping[float, float],
    unions: Mapping[int, float],
) -> str:
    """Left: miss ratio by multiplier (line measured, circles from octiles at 5x, diamonds from
    ghosts at 2x). Right: union of consecutive rows' top-k in multiples of top-k, as bars."""
    top = max(*misses.values(), *predicted_below.values(), *predicted_above.values()) * 1.15

    def x(multiplier: float) -> float:
        return _MARGIN + (multiplier - 1) / 4 * (_WIDTH - 2 * _MARGIN)

    def y(ratio: float) -> float:
        return _HEIGHT - _MARGIN - ratio / top * (_HEIGHT - 2 * _MARGIN)

    parts = [_frame(0, "miss ratio by multiplier", "hot rows / top-k")]
    for tenth in range(int(top * 20) + 1):
        ratio = tenth / 20
        parts.append(
            f'<line class="grid" x1="{_MARGIN}" x2="{_WIDTH - _MARGIN}" '
            f'y1="{y(ratio):.1f}" y2="{y(ratio):.1f}"/>'
            f'<text x="{_MARGIN - 6}" y="{y(ratio) + 4:.1f}" text-anchor="end">{ratio:.0%}</text>'
        )
    parts += [
        f'<text x="{x(m):.1f}" y="{_HEIGHT - _MARGIN + 16}" text-anchor="middle">{m}x</text>'
        for m in (1, 2, 3, 4, 5)
    ]
    line = " ".join(f"{x(m):.1f},{y(ratio):.1f}" for m, ratio in sorted(misses.items()))
    parts.append(f'<polyline class="measured" points="{line}"/>')
    parts += [
        f'<circle class="dot" cx="{x(m):.1f}" cy="{y(r):.1f}" r="3"/>' for m, r in misses.items()
    ]
    parts += [
        f'<circle class="below" cx="{x(m):.1f}" cy="{y(r):.1f}" r="6"/>'
        for m, r in predicted_below.items()
    ]
    parts += [
        f'<path class="above" d="M{x(m):.1f} {y(r) - 7:.1f}l7 7l-7 7l-7 -7z"/>'
        for m, r in predicted_above.items()
        if m <= 5
    ]
    parts.append(
        f'<text x="{_WIDTH / 2}" y="{_MARGIN - 6}" text-anchor="middle">dots measured, circles '
        "octiles at 5x, diamonds ghosts at 2x</text>"
    )
    parts.append(_frame(_WIDTH, "union of consecutive rows", "rows in one step"))
    parts += _bars(unions)
    body = "".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * _WIDTH}" height="{_HEIGHT}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>{body}</svg>\n'
    )


def _frame(left: int, title: str, below: str) -> str:
    middle = left + _WIDTH / 2
    return (
        f'<text x="{middle}" y="20" text-anchor="middle" font-weight="bold">{title}</text>'
        f'<text x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">{below}</text>'
        f'<line class="axis" x1="{left + _MARGIN}" x2="{left + _WIDTH - _MARGIN}" '
        f'y1="{_HEIGHT - _MARGIN}" y2="{_HEIGHT - _MARGIN}"/>'
    )


def _bars(unions: Mapping[int, float]) -> list[str]:
    span = (_WIDTH - 2 * _MARGIN) / len(unions)
    height = (_HEIGHT - 2 * _MARGIN) / (max(unions.values()) * 1.15)
    bars = []
    for index, (rows, union) in enumerate(unions.items()):
        left = _WIDTH + _MARGIN + index * span + span * 0.2
        top = _HEIGHT - _MARGIN - union * height
        bars.append(
            f'<rect class="bar" x="{left:.1f}" y="{top:.1f}" width="{span * 0.6:.1f}" '
            f'height="{union * height:.1f}"/>'
            f'<text x="{left + span * 0.3:.1f}" y="{top - 5:.1f}" text-anchor="middle">'
            f"{union:.2f}x</text>"
            f'<text x="{left + span * 0.3:.1f}" y="{_HEIGHT - _MARGIN + 16}" '
            f'text-anchor="middle">{rows}</text>'
        )
    return bars
