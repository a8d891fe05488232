"""One kind of chart as inline SVG: lines or dots over time, with axes, units and a legend.

Colours are CSS classes ``c0``, ``c1``, ... of the page that holds it. Pure: numbers in, text out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 620, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 44, 40
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
    """From 0 to at least ``most`` in some five steps of 1, 2 or 5 times a power of ten."""
    if not most > 0:
        return [0.0, 1.0]
    step = 10.0 ** math.floor(math.log10(most / _TICKS))
    step *= next(factor for factor in (1, 2, 5, 10) if most / (step * factor) <= _TICKS)
    return [step * number for number in range(math.ceil(most / step - 1e-9) + 1)]


def chart(
    title: str, series: Iterable[Series], *, x_unit: str, y_unit: str, x_most: float = 0.0
) -> str:
    """An ``<svg>`` element. Both axes begin at 0; that of x reaches at least to ``x_most``."""
    drawn = [one for one in series if one.points]
    xs = nice_ticks(max([x_most, *(x for one in drawn for x, _ in one.points)]))
    ys = nice_ticks(max([0.0, *(y for one in drawn for _, y in one.points)]))

    def across(x: float) -> float:
        return _LEFT + x / xs[-1] * (WIDTH - _LEFT - _RIGHT)

    def up(y: float) -> float:
        return HEIGHT - _BOTTOM - y / ys[-1] * (HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{_LEFT}" y="15">{escape(title)}</text>',
        *_legend(drawn),
    ]
    parts.extend(
        f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{up(y):.1f}" '
        f'y2="{up(y):.1f}"/>'
        f'<text class="tick" x="{_LEFT - 6}" y="{up(y) + 4:.1f}" text-anchor="end">'
        f"{_number(y)}</text>"
        for y in ys
    )
    parts.extend(
        f'<text class="tick" x="{across(x):.1f}" y="{HEIGHT - _BOTTOM + 16}" '
        f'text-anchor="middle">{_number(x)}</text>'
        for x in xs
    )
    parts.append(
        f'<text class="tick" x="{(_LEFT + WIDTH) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(x_unit)}</text>"
        f'<text class="tick" transform="translate(12 {(_TOP + HEIGHT - _BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(y_unit)}</text>'
    )
    for one in drawn:
        places = [(across(x), up(y)) for x, y in one.points]
        parts.append(_dots(one, places) if one.dots else _line(one, places))
    return "\n".join([*parts, "</svg>"])


def _line(one: Series, places: Sequence[tuple[float, float]]) -> str:
    dash = ' stroke-dasharray="6 4"' if one.dashed else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline class="line c{one.colour}" fill="none"{dash} points="{path}"/>'


def _dots(one: Series, places: Sequence[tuple[float, float]]) -> str:
    circles = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>' for x, y in places)
    return f'<g class="dot c{one.colour}">{circles}</g>'


def _legend(drawn: Sequence[Series]) -> Iterable[str]:
    x = float(_LEFT)
    for one in drawn:
        mark = (x + 9, 28.0)
        if one.dots:
            yield f'<g class="dot c{one.colour}"><circle cx="{mark[0]}" cy="28" r="3"/></g>'
        else:
            yield _line(one, [(x, 28.0), (x + 18, 28.0)])
        yield f'<text class="tick" x="{x + 23}" y="32">{escape(one.label)}</text>'
        x += 40 + 6.2 * len(one.label)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"
