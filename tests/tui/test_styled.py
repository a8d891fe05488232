"""Lines keep to their width, whatever is in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparsed.tui.styled import drop, ends, fit, line, wrap
from hisparsed.tui.views.bars import Segment, bar, cells_of, marks


@given(st.text(), st.integers(1, 60))
def test_a_fitted_line_has_exactly_its_width(text: str, width: int) -> None:
    assert fit(line(text, ("end", "bad")), width).cells == width


@given(st.text(max_size=40), st.text(max_size=40), st.integers(2, 60))
def test_ends_have_exactly_their_width(left: str, right: str, width: int) -> None:
    assert ends(line(left), line(right), width).cells == width


@given(st.text(max_size=200), st.integers(4, 40))
def test_wrapped_lines_are_no_wider_than_asked(text: str, width: int) -> None:
    assert all(one.cells <= width for one in wrap(text, width))


def test_wrapping_loses_no_word() -> None:
    words = "Lend the offload pool 424 host blocks instead of 480."
    assert " ".join(one.plain for one in wrap(words, 20)) == words


def test_control_characters_of_a_node_never_reach_the_terminal() -> None:
    assert line("a\x1b[31mb\x07\nc").plain == "a [31mb  c"


def test_a_cut_line_says_so() -> None:
    assert fit(line("held-prefix-first"), 8).plain == "held-pr…"
    assert fit(line("held-prefix-first"), 8, more="~").plain == "held-pr~"


def test_dropping_keeps_roles() -> None:
    assert drop(line(("abc", "x"), ("def", "y")), 4).spans == (("ef", "y"),)


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=6), st.integers(1, 120))
def test_parts_of_a_bar_never_exceed_it(amounts: list[float], width: int) -> None:
    cells = cells_of(amounts, max(1.0, sum(amounts)), width)
    assert sum(cells) <= width
    assert all(count >= 0 for count in cells)


@given(st.floats(1e-9, 1e-3), st.integers(2, 120))
def test_what_is_not_zero_shows(share: float, width: int) -> None:
    assert cells_of([share, 1 - share], 1.0, width)[0] == 1


def test_a_full_bar_is_full() -> None:
    assert cells_of([1, 1, 1], 3, 10) == [4, 3, 3]
    parts = [Segment(7, "#", "a"), Segment(3, "=", "b")]
    assert bar(parts, 10, 20, free=".").plain == "#" * 14 + "=" * 6


@pytest.mark.parametrize(("share", "place"), [(0.0, 0), (0.5, 5), (1.0, 9), (2.0, 9), (-1.0, 0)])
def test_marks_stay_on_the_bar(share: float, place: int) -> None:
    assert marks([(share, "v", "")], 10).plain.index("v") == place
