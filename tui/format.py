"""Numbers, sizes, times and shares as short text of a steady width. ``None`` is "-"."""

from __future__ import annotations

from datetime import UTC, datetime

UNKNOWN = "-"
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T")


def size(count: float | None) -> str:
    """Bytes in binary units with three figures: "35.6 MiB"."""
    if count is None:
        return UNKNOWN
    value, unit = float(count), 0
    while abs(value) >= 1000 and unit < len(_BINARY) - 1:
        value, unit = value / 1024, unit + 1
    return f"{_three(value) if unit else f'{value:.0f}'} {_BINARY[unit]}"


def per_second(count: float | None) -> str:
    """Bytes per second."""
    return UNKNOWN if count is None else f"{size(count)}/s"


def short(count: float | None) -> str:
    """A count with three figures: "21.6k"; whole below a thousand."""
    if count is None:
        return UNKNOWN
    value, unit = float(count), 0
    while abs(value) >= 999.5 and unit < len(_DECIMAL) - 1:
        value, unit = value / 1000, unit + 1
    if unit:
        return f"{_three(value)}{_DECIMAL[unit]}"
    return f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.1f}"


def whole(count: float | None) -> str:
    """Every digit: "21,648"."""
    return UNKNOWN if count is None else f"{count:,.0f}"


def counted(count: float | None, noun: str) -> str:
    """ "1 call", "17 calls"."""
    return f"{whole(count)} {noun}{'' if count == 1 else 's'}"


def calls(count: float, verb: str) -> str:
    """Such as "1 call waits" and "17 calls wait"."""
    return f"{counted(count, 'call')} {verb}{'s' if count == 1 else ''}"


def percent(share: float | None, digits: int = 0) -> str:
    """A share above 0 that rounds to 0 is "<1%"."""
    if share is None:
        return UNKNOWN
    least = 10.0**-digits
    if 0 < share * 100 < least / 2:
        return f"<{least:g}%"
    return f"{share * 100:.{digits}f}%"


def ratio(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"


def duration(seconds: float | None) -> str:
    """Two units at most: "43s", "2m05s", "3h12m", "5d04h"; milliseconds below a second."""
    if seconds is None:
        return UNKNOWN
    if abs(seconds) < 0.9995:
        return f"{seconds * 1000:.0f}ms" if abs(seconds) >= 0.00095 else f"{seconds * 1e6:.0f}us"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole_s = round(seconds)
    for unit, name, small, small_name in (
        (86_400, "d", 3_600, "h"),
        (3_600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole_s >= unit:
            return f"{whole_s // unit}{name}{whole_s % unit // small:02d}{small_name}"
    return f"{whole_s}s"


def whole_duration(seconds: float) -> str:
    """As ``duration``, without parts of a second: "0s", "8s", "2m05s"."""
    whole_s = max(0, round(seconds))
    return f"{whole_s}s" if whole_s < 60 else duration(whole_s)


def span(seconds: float) -> str:
    """A round time without zero parts: "1m", "15m", "2h", "1h30m"."""
    return duration(seconds).replace("h00m", "h").replace("m00s", "m").replace("d00h", "d")


def minute(unix_s: float | None) -> str:
    """Local time of day to the minute."""
    return _local(unix_s, "%H:%M")


def multiplier(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:g}x"


def setting(value: object) -> str:
    """The value of a lever or a policy key, as an operator writes it."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def clock(unix_s: float | None) -> str:
    """Local time of day."""
    return _local(unix_s, "%H:%M:%S")


def moment(unix_s: float | None) -> str:
    """Local date and time."""
    return _local(unix_s, "%Y-%m-%d %H:%M:%S")


def _local(unix_s: float | None, form: str) -> str:
    if unix_s is None:
        return UNKNOWN
    try:
        return datetime.fromtimestamp(unix_s, UTC).astimezone().strftime(form)
    except (ValueError, OverflowError, OSError):
        return UNKNOWN  # the date is out of range


def _three(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
