"""Sizes, times and shares: what is read, what is refused with which hint, and round trips."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from pydantic_core import PydanticCustomError

from hisparsed.policy.units import (
    ByteSize,
    Duration,
    Fraction,
    counted,
    exact_bytes,
    format_bytes,
    format_duration,
    format_fraction,
    parse_bytes,
    parse_duration,
    parse_fraction,
)


def hint_of(error: PydanticCustomError) -> str:
    assert error.context is not None
    return str(error.context["hint"])


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("384GiB", 384 * 2**30),
        ("1.5 TiB", 3 * 2**39),
        ("512MB", 512_000_000),
        ("2kB", 2000),
        ("2KB", 2000),
        ("2KiB", 2048),
        ("7B", 7),
        ("0B", 0),
        ("0.1GiB", 107374182),
        (4096, 4096),
        (0, 0),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_size_read(text: object, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("value", "message", "hint"),
    [
        ("4 GB/s", '"4 GB/s" is not a size', "write a number with a unit such as 4GiB"),
        ("10G", '"10G" is not a size: the unit "G" is not known', "write 10GiB or 10GB"),
        ("10Gb", '"10Gb" is not a size: the unit "Gb" is not known', "write 10GiB or 10GB"),
        ("10gib", '"10gib" is not a size: the unit "gib" is not known', "write 10GiB"),
        ("3 parsecs", '"3 parsecs" is not a size: the unit "parsecs"', "write 3PiB or 3PB"),
        ("3 xB", '"3 xB" is not a size: the unit "xB"', "write a number with a unit such as 4GiB"),
        ("10GB ", '"10GB " is not a size', "remove the spaces around it: 10GB"),
        ("12", '"12" is not a size', "add a unit: 12GiB, 12MiB"),
        ("-1GiB", '"-1GiB" is not a size', "write a number with a unit such as 4GiB"),
        ("1e3MiB", '"1e3MiB" is not a size', "write a number with a unit such as 4GiB"),
        ("", '"" is not a size', "write a number with a unit such as 4GiB"),
        (-1, "-1 is out of range", "sizes go from 0 to 9223372036854775807 bytes (8388608TiB)"),
        (2**63, "9223372036854775808 is out of range", "sizes go from 0 to"),
        ("9000PiB", '"9000PiB" is out of range', "sizes go from 0 to"),
        (True, "true is not a size", "write a number with a unit such as 4GiB"),
        (1.5, "1.5 is not a size", "write a number with a unit such as 4GiB"),
        (None, "null is not a size", "write a number with a unit such as 4GiB"),
        (["1GiB"], '["1GiB"] is not a size', "write a number with a unit such as 4GiB"),
    ],
)
def test_size_refused(value: object, message: str, hint: str) -> None:
    with pytest.raises(PydanticCustomError) as caught:
        parse_bytes(value)
    assert str(caught.value).startswith(message)
    assert hint_of(caught.value).startswith(hint)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30.0),
        ("250ms", 0.25),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5d", 129600.0),
        ("1d2h3m4s5ms", 93784.005),
        ("0s", 0.0),
        (5, 5.0),
        (2.5, 2.5),
    ],
)
def test_duration_read(text: object, seconds: float) -> None:
    result = parse_duration(text)
    assert isinstance(result, float)
    assert result == pytest.approx(seconds, abs=1e-12)


@pytest.mark.parametrize(
    ("value", "message", "hint"),
    [
        ("30", '"30" is not a time', "add a unit: 30s, 30ms"),
        ("1 h", '"1 h" is not a time', "write it without spaces: 1h"),
        ("", '"" is not a time', "write a time such as 30s"),
        ("5min", '"5min" is not a time', "write a time such as 30s"),
        ("90m1h", '"90m1h" is not a time', "write a time such as 30s"),
        ("5M", '"5M" is not a time', "write a time such as 30s"),
        ("-5s", '"-5s" is not a time', "write a time such as 30s"),
        (-1, "-1 is out of range", "times are 0, or from 1ms to 3650d"),
        (math.nan, "NaN is out of range", "times are 0, or from 1ms to 3650d"),
        (math.inf, "Infinity is out of range", "times are 0, or from 1ms to 3650d"),
        (1e300, "1e+300 is out of range", "times are 0, or from 1ms to 3650d"),
        ("3651d", '"3651d" is out of range', "times are 0, or from 1ms to 3650d"),
        ("9" * 400 + "d", '"999', "times are 0, or from 1ms to 3650d"),
        (True, "true is not a time", "write a time such as 30s"),
        (None, "null is not a time", "write a time such as 30s"),
    ],
)
def test_duration_refused(value: object, message: str, hint: str) -> None:
    with pytest.raises(PydanticCustomError) as caught:
        parse_duration(value)
    assert str(caught.value).startswith(message)
    assert hint_of(caught.value).startswith(hint)


@pytest.mark.parametrize(
    ("text", "share"),
    [("10%", 0.1), ("12.5 %", 0.125), ("0%", 0.0), ("100%", 1.0), (0.1, 0.1), (0, 0.0), (1, 1.0)],
)
def test_fraction_read(text: object, share: float) -> None:
    result = parse_fraction(text)
    assert isinstance(result, float)
    assert result == share


@pytest.mark.parametrize(
    ("value", "message", "hint"),
    [
        (10, "10 is not between 0 and 1", "write 10%"),
        (200, "200 is not between 0 and 1", "write 0% to 100%, or 0 to 1"),
        (-0.1, "-0.1 is not between 0 and 1", "write 0% to 100%, or 0 to 1"),
        (math.nan, "NaN is not between 0 and 1", "write 0% to 100%, or 0 to 1"),
        ("110%", '"110%" is above 100%', "write 0% to 100%"),
        ("0.1", '"0.1" is not a share', "write a percentage such as 10%, or 0.1"),
        ("10 percent", '"10 percent" is not a share', "write a percentage such as 10%, or 0.1"),
        (True, "true is not a share", "write a percentage such as 10%, or 0.1"),
        (None, "null is not a share", "write a percentage such as 10%, or 0.1"),
    ],
)
def test_fraction_refused(value: object, message: str, hint: str) -> None:
    with pytest.raises(PydanticCustomError) as caught:
        parse_fraction(value)
    assert str(caught.value) == message
    assert hint_of(caught.value) == hint


def test_annotated_types_validate_in_models() -> None:
    assert TypeAdapter(ByteSize).validate_python("1KiB") == 1024
    assert TypeAdapter(Duration).validate_python("1m") == 60.0
    assert TypeAdapter(Fraction).validate_python("50%") == 0.5


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (1536, "1.5KiB"),
        (2**20 - 1, "1MiB"),
        (3 * 2**39, "1.5TiB"),
        (2**63 - 1, "8192PiB"),
        (-2048, "-2KiB"),
    ],
)
def test_size_text(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.00025, "0.25ms"),
        (0.25, "250ms"),
        (0.9999999, "1s"),
        (2.5, "2.5s"),
        (59.9999, "1m"),
        (90, "1m30s"),
        (5400, "1h30m"),
        (90000, "1d1h"),
        (-90, "-1m30s"),
    ],
)
def test_duration_text(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_fraction_text() -> None:
    assert [format_fraction(share) for share in (0, 0.1, 0.125, 1 / 3, 1)] == [
        "0%",
        "10%",
        "12.5%",
        "33.33%",
        "100%",
    ]


@given(st.integers(0, 2**63 - 2**53))
def test_size_round_trip(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.006)


@given(st.integers(1, 1023), st.sampled_from([2**10, 2**20, 2**30, 2**40]))
def test_whole_sizes_come_back_exactly(number: int, unit: int) -> None:
    assert parse_bytes(format_bytes(number * unit)) == number * unit


@given(st.just(0.0) | st.floats(0.001, 1e8))
def test_duration_round_trip(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, abs=0.000501)


@given(st.floats(0, 1))
def test_fraction_round_trip(share: float) -> None:
    assert parse_fraction(format_fraction(share)) == pytest.approx(share, abs=0.0000501)


@given(st.text(max_size=12) | st.integers() | st.floats() | st.booleans() | st.none())
def test_anything_is_read_or_refused(value: object) -> None:
    for parse, top in ((parse_bytes, 2**63 - 1), (parse_duration, math.inf), (parse_fraction, 1)):
        try:
            result = parse(value)
        except PydanticCustomError as error:
            assert hint_of(error)
        else:
            assert 0 <= result <= top


@pytest.mark.parametrize("plain", [1, 20, 384, 1023])
def test_a_small_plain_size_is_a_forgotten_unit(plain: int) -> None:
    with pytest.raises(ValueError, match=f"{plain} has no unit"):
        parse_bytes(plain)
    assert parse_bytes(f"{plain}B") == plain


def test_plain_sizes_from_a_kibibyte_on_are_bytes() -> None:
    assert (parse_bytes(0), parse_bytes(1024)) == (0, 1024)


@pytest.mark.parametrize(
    ("count", "text"), [(37 * 10**9, "37GB"), (1500, "1500B"), (2000, "2kB"), (0, "0B")]
)
def test_an_exact_size_is_short_where_decimal_units_hold_it(count: int, text: str) -> None:
    assert exact_bytes(count) == text
    assert parse_bytes(text) == count


def test_one_of_a_thing_is_singular() -> None:
    said = [counted(count, "round") for count in (0, 1, 2, 1204)]
    assert said == ["0 rounds", "1 round", "2 rounds", "1,204 rounds"]
