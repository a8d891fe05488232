"""Sizes, times and shares as people write them, and back to text.

For configuration models (annotated types) and for every sentence an operator reads. A plain
number is in the base unit: bytes, seconds, share of one. Not for token or block counts.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, WithJsonSchema

from hisparsed.policy.problems import refuse, shown

_BINARY: Final = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_DECIMAL: Final = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_SIZE_UNITS: Final = _BINARY | _DECIMAL
_SIZE_HINT: Final = "write a number with a unit such as 4GiB"
_MAX_BYTES: Final = 2**63 - 1
_LEAST_PLAIN_BYTES: Final = 1024
"""A smaller plain number is a forgotten unit: no setting is a few bytes."""

_TIME_UNITS: Final = {
    "d": Decimal(86400),
    "h": Decimal(3600),
    "m": Decimal(60),
    "s": Decimal(1),
    "ms": Decimal("0.001"),
}
MIN_SECONDS: Final = 0.001
"""The shortest time except 0; a node could not keep a shorter one."""
MAX_SECONDS: Final = 3650 * 86_400.0
_TIME_RANGE: Final = "times are 0, or from 1ms to 3650d"
MIN_SHARE: Final = 1e-6
"""The smallest share except 0."""
_SHARE_RANGE: Final = "shares are 0%, or from 0.0001% to 100%"
_TIME_HINT: Final = "write a time such as 30s, 250ms, 5m or 1h30m"

_NUMBER: Final = r"[0-9]+(?:\.[0-9]+)?"
_SIZE: Final = re.compile(rf"({_NUMBER}) ?([A-Za-z]+)", re.ASCII)
_TIME: Final = re.compile(
    "".join(rf"(?:(?P<{unit}>{_NUMBER}){unit})?" for unit in _TIME_UNITS), re.ASCII
)
_SHARE: Final = re.compile(rf"({_NUMBER}) ?%", re.ASCII)


def parse_bytes(value: object) -> int:
    """Bytes from "384GiB", "1.5 TiB", "512MB" or a whole number of bytes from 1024 on, or 0.

    Raises ``PydanticCustomError``, a ``ValueError``, that says the expected value.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if 0 < value < _LEAST_PLAIN_BYTES:
            hint = f"write {value}GiB, {value}MiB, or {value}B if bytes are meant"
            raise refuse("size", f"{value} has no unit", hint=hint)
        return _checked_bytes(value, value)
    if not isinstance(value, str):
        raise refuse("size", f"{shown(value)} is not a size", hint=_SIZE_HINT)
    match = _SIZE.fullmatch(value)
    if match is None:
        raise refuse("size", f"{shown(value)} is not a size", hint=_size_hint(value))
    number, unit = match.groups()
    if unit not in _SIZE_UNITS:
        message = f"{shown(value)} is not a size: the unit {shown(unit)} is not known"
        raise refuse("size", message, hint=_unit_hint(number, unit))
    return _checked_bytes(round(Decimal(number) * _SIZE_UNITS[unit]), value)


def _checked_bytes(count: int, value: object) -> int:
    if not 0 <= count <= _MAX_BYTES:
        hint = f"sizes go from 0 to {_MAX_BYTES} bytes (8388608TiB)"
        raise refuse("size", f"{shown(value)} is out of range", hint=hint)
    return count


def _size_hint(value: str) -> str:
    stripped = value.strip()
    if stripped != value and _SIZE.fullmatch(stripped):
        return f"remove the spaces around it: {stripped}"
    if re.fullmatch(_NUMBER, stripped, re.ASCII):
        return f"add a unit: {stripped}GiB, {stripped}MiB"
    return _SIZE_HINT


def _unit_hint(number: str, unit: str) -> str:
    """Name both readings of a sloppy unit ("g", "Gb", "gib") rather than guess."""
    letter = unit[0].upper()
    readings = [
        f"{number}{known}" for known in (f"{letter}iB", f"{letter}B") if known in _SIZE_UNITS
    ]
    if unit.lower() in {known.lower() for known in _BINARY}:
        readings = readings[:1]
    return f"write {' or '.join(readings)}" if readings else _SIZE_HINT


def parse_duration(value: object) -> float:
    """Seconds from "30s", "250ms", "5m", "1h30m", or a plain number of seconds.

    Raises ``PydanticCustomError``, a ``ValueError``, that says the expected value.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _checked_seconds(value, value)
    if not isinstance(value, str):
        raise refuse("duration", f"{shown(value)} is not a time", hint=_TIME_HINT)
    match = _TIME.fullmatch(value)
    if match is None or not value:
        raise refuse("duration", f"{shown(value)} is not a time", hint=_time_hint(value))
    parts: Mapping[str, str | None] = match.groupdict()
    seconds = sum(
        (Decimal(number) * _TIME_UNITS[unit] for unit, number in parts.items() if number),
        Decimal(0),
    )
    return _checked_seconds(seconds, value)


def _checked_seconds(seconds: float | Decimal, value: object) -> float:
    if 0 <= seconds <= MAX_SECONDS:
        number = float(seconds)
        if not number or number >= MIN_SECONDS:
            return number
    raise refuse("duration", f"{shown(value)} is out of range", hint=_TIME_RANGE)


def _time_hint(value: str) -> str:
    stripped = value.replace(" ", "")
    if re.fullmatch(_NUMBER, stripped, re.ASCII):
        return f"add a unit: {stripped}s, {stripped}ms"
    if stripped and stripped != value and _TIME.fullmatch(stripped):
        return f"write it without spaces: {stripped}"
    return _TIME_HINT


def parse_fraction(value: object) -> float:
    """A share 0..1 from "10%" or 0.1.

    Raises ``PydanticCustomError``, a ``ValueError``, that says the expected value.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not value or MIN_SHARE <= value <= 1:
            return float(value)
        if 0 < value < MIN_SHARE:
            raise refuse("fraction", f"{shown(value)} is out of range", hint=_SHARE_RANGE)
        message = f"{shown(value)} is not between 0 and 1"
        hint = f"write {value}%" if 1 < value <= 100 else "write 0% to 100%, or 0 to 1"
        raise refuse("fraction", message, hint=hint)
    match = _SHARE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        message = f"{shown(value)} is not a share"
        raise refuse("fraction", message, hint="write a percentage such as 10%, or 0.1")
    percent = Decimal(match.group(1))
    if percent > 100:
        raise refuse("fraction", f"{shown(value)} is above 100%", hint="write 0% to 100%")
    share = float(percent / 100)
    if 0 < share < MIN_SHARE:
        raise refuse("fraction", f"{shown(value)} is out of range", hint=_SHARE_RANGE)
    return share


def format_bytes(count: int) -> str:
    """Such as "1.5TiB": the largest binary unit that leaves at least 1, at most two decimals."""
    if count < 0:
        return f"-{format_bytes(-count)}"
    for unit, size in reversed(_BINARY.items()):
        # Compared as rounded, so that a hair below 1GiB is not "1024MiB"; bytes stay exact.
        if count >= 1024 and round(1024 * count / size, 2) >= 1024:
            return f"{_trimmed(count / size, 2)}{unit}"
    return f"{count}B"


def exact_bytes(count: int) -> str:
    """Such as "37GB": in decimal units where they hold it whole, else in bytes."""
    for unit in ("PB", "TB", "GB", "MB", "kB"):
        if count and count % _DECIMAL[unit] == 0:
            return f"{count // _DECIMAL[unit]}{unit}"
    return f"{count}B"


def counted(count: int, noun: str) -> str:
    """Such as "1 round" or "1,204 rounds"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_duration(seconds: float) -> str:
    """Such as "1h30m" or "250ms": to the millisecond, below one second to the microsecond."""
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if round(seconds, 6) < 1:
        return f"{_trimmed(seconds * 1000, 3)}ms" if round(seconds, 6) else "0s"
    left = round(Decimal(seconds), 3)
    parts = []
    for unit in ("d", "h", "m"):
        count, left = divmod(left, _TIME_UNITS[unit])
        if count:
            parts.append(f"{int(count)}{unit}")
    if left:
        parts.append(f"{_trimmed(float(left), 3)}s")
    return "".join(parts)


def format_fraction(share: float) -> str:
    """Such as "12.5%": at most two decimals."""
    return f"{_trimmed(share * 100, 2)}%"


def _trimmed(number: float, decimals: int) -> str:
    text = f"{number:.{decimals}f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _as_json_schema(pattern: str, *numbers: dict[str, Any]) -> WithJsonSchema:
    """Text with a unit, or a plain number."""
    return WithJsonSchema({"anyOf": [{"type": "string", "pattern": f"^(?:{pattern})$"}, *numbers]})


_SIZE_PATTERN: Final = rf"{_NUMBER} ?(?:{'|'.join(_SIZE_UNITS)})"
_TIME_PATTERN: Final = "(?=.)" + "".join(rf"(?:{_NUMBER}{unit})?" for unit in _TIME_UNITS)

ByteSize = Annotated[
    int,
    BeforeValidator(parse_bytes),
    _as_json_schema(
        _SIZE_PATTERN, {"const": 0}, {"type": "integer", "minimum": _LEAST_PLAIN_BYTES}
    ),
]
"""Whole bytes, 0 or more."""
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    _as_json_schema(_TIME_PATTERN, {"type": "number", "minimum": 0, "maximum": MAX_SECONDS}),
]
"""Seconds: none, or a millisecond to ten years."""
Fraction = Annotated[
    float,
    BeforeValidator(parse_fraction),
    _as_json_schema(rf"{_NUMBER} ?%", {"type": "number", "minimum": 0, "maximum": 1}),
]
"""A share: none, or a millionth to 1."""
