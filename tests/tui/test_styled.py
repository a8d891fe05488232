"""Lines keep to their width, whatever is in them; numbers are as operators read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparsed.tui import format as fmt
from hisparsed.tui.styled import drop, ends, fit, line, wrap, wrap_line
from hisparsed.tui.views.drawing import BarSegment, bar, cells_of, marks


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


@given(st.text(st.characters(max_codepoint=0x2FF), max_size=200), st.integers(12, 60))
def test_a_line_wrapped_with_its_roles_keeps_to_the_width(text: str, width: int) -> None:
    wrapped = wrap_line(line(("12:00  ", "dim"), text), width, 4)
    assert all(one.cells <= width for one in wrapped)
    joined = "".join(one.plain for one in wrapped)
    assert joined.replace(" ", "") == line("12:00", text).plain.replace(" ", "")


def test_a_wrapped_line_breaks_between_words_and_keeps_roles() -> None:
    text = line(("12:00  ", "dim"), ("moved ", "good"), "because requests ", ("waited", "bad"))
    wrapped = wrap_line(text, 22, 7)
    assert [one.plain for one in wrapped] == ["12:00  moved because", "       requests waited"]
    assert wrapped[0].spans[:2] == (("12:00  ", "dim"), ("moved ", "good"))
    assert wrapped[1].spans[-1] == ("waited", "bad")


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
    parts = [BarSegment(7, "#", "a"), BarSegment(3, "=", "b")]
    assert bar(parts, 10, 20, free=".").plain == "#" * 14 + "=" * 6


@pytest.mark.parametrize(("share", "place"), [(0.0, 0), (0.5, 5), (1.0, 9), (2.0, 9), (-1.0, 0)])
def test_marks_stay_on_the_bar(share: float, place: int) -> None:
    assert marks([(share, "v", "")], 10).plain.index("v") == place


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"), (0, "0 B"), (999, "999 B"), (1_000, "0.98 KiB"), (37_339_136, "35.6 MiB"),
        (2**40, "1.00 TiB"), (1.5 * 2**50, "1.50 PiB"), (999 * 2**20, "999 MiB"),
    ],
)  # fmt: skip
def test_sizes_have_three_figures(count: float | None, text: str) -> None:
    assert fmt.size(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"), (0, "0"), (7.25, "7.2"), (999, "999"), (999.6, "1.00k"), (21_648, "21.6k"),
        (1_234_567, "1.23M"),
    ],
)  # fmt: skip
def test_counts_are_short(count: float | None, text: str) -> None:
    assert fmt.short(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"), (0.000_131, "131us"), (0.0288, "29ms"), (0.9999, "1.0s"), (2.36, "2.4s"),
        (9.96, "10s"), (43, "43s"), (125, "2m05s"), (11_520, "3h12m"), (450_000, "5d05h"),
    ],
)  # fmt: skip
def test_durations_have_two_units_at_most(seconds: float | None, text: str) -> None:
    assert fmt.duration(seconds) == text


def test_times_are_local() -> None:
    assert fmt.clock(1_700_000_000) == "22:13:20"
    assert fmt.moment(1_700_000_000) == "2023-11-14 22:13:20"
