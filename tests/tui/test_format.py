"""Numbers as operators read them."""

from __future__ import annotations

import pytest

from hisparsed.tui import format as fmt


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
