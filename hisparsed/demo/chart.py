"""One kind of chart as HTML: lines or dots over time, with axes, units and a legend.

Axes and lines are inline SVG. Title and legend are HTML, so that they wrap on a narrow page.
Colours are CSS classes ``c0``, ``c1``, ... of the page that holds it. Pure: numbers in, text out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 620, 234
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 32, 26
_TICKS = 5


@dataclass(frozen=True)
class Series:
    """``points`` are (x, y), rising in x. ``colour`` is the number of a class."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: int
    dashed: bool = False
    dots: bool = False


def nice_ticks(most: float) -> list[float]:
    """From 0 to at least ``most`` in at most five steps of 1, 2 or 5 times a power of ten."""
    if not most > 0:
        return [0.0, 1.0]
    step = 10.0 ** math.floor(math.log10(most / _TICKS))
    step *= next(factor for factor in (1, 2, 5, 10) if most / (step * factor) <= _TICKS)
    return [step * number for number in range(math.ceil(most / step - 1e-9) + 1)]


def chart(
    title: str,
    series: Iterable[Series],
    *,
    x_unit: str,
    y_unit: str,
    x_most: float = 0.0,
    y_most: float = 0.0,
) -> str:
    """A ``<figure>`` element. Both axes begin at 0; they reach at least to ``x_most`` and
    ``y_most``, the y axis ends at a tick."""
    drawn = [one for one in series if one.points]
    x_end = max([x_most, *(x for one in drawn for x, _ in one.points)])
    x_end = x_end if x_end > 0 else 1.0
    xs = [x for x in nice_ticks(x_end) if x <= x_end]
    ys = nice_ticks(max([y_most, *(y for one in drawn for _, y in one.points)]))

    def across(x: float) -> float:
        return _LEFT + x / x_end * (WIDTH - _LEFT - _RIGHT)

    def up(y: float) -> float:
        return HEIGHT - _BOTTOM - y / ys[-1] * (HEIGHT - _TOP - _BOTTOM)

    parts = [
        f"<figure><figcaption><b>{escape(title)}</b>{_legend(drawn)}</figcaption>",
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text class="tick" x="0" y="13">{escape(y_unit)}</text>',
    ]
    parts.extend(
        f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{up(y):.1f}" '
        f'y2="{up(y):.1f}"/>'
        f'<text class="tick" x="{_LEFT - 6}" y="{up(y) + 4:.1f}" text-anchor="end">'
        f"{_number(y)}</text>"
        for y in ys
    )
    parts.extend(
        f'<text class="tick" x="{across(x):.1f}" y="{HEIGHT - 6}" '
        f'text-anchor="middle">{_number(x)} {escape(x_unit)}</text>'
        for x in xs
    )
    for one in drawn:
        places = [(across(x), up(y)) for x, y in one.points]
        parts.append(_dots(one, places) if one.dots else _line(one, places))
    return "\n".join([*parts, "</svg></figure>"])


def _line(one: Series, places: Sequence[tuple[float, float]]) -> str:
    dash = ' stroke-dasharray="6 4"' if one.dashed else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline class="line c{one.colour}" fill="none"{dash} points="{path}"/>'


def _dots(one: Series, places: Sequence[tuple[float, float]]) -> str:
    circles = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>' for x, y in places)
    return f'<g class="dot c{one.colour}">{circles}</g>'


def _legend(drawn: Sequence[Series]) -> str:
    return "".join(
        f'<span class="key {_mark(one)} c{one.colour}">{escape(one.label)}</span>' for one in drawn
    )


def _mark(one: Series) -> str:
    return "dots" if one.dots else "dashed" if one.dashed else "solid"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"
