"""Reads the values operators type for a replay: scales, durations, token ranges.

Each returns the parsed value or raises a `UserError` that names the option, the value and what is
right.
"""

import re
from fractions import Fraction

from hisparsed.errors import UserError
from hisparsed.replay.prompt import TokenRange

_SECONDS_PER = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_scale(text: str) -> Fraction:
    """`1/16`, `0.25` or `2`."""
    match = re.fullmatch(r"\d{1,9}(?:\.\d{1,9}|/0*[1-9]\d{0,8})?", text.strip())
    factor = Fraction(match[0]) if match else Fraction(0)
    if factor <= 0:
        raise UserError(
            f"--scale: {text!r} is not right; need a number above 0 such as 1/16 or 0.25"
        )
    return factor


def parse_duration_s(option: str, text: str) -> float:
    """`500ms`, `60s`, `5m` or `1h`, in seconds, above 0."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h)\s*", text)
    seconds = float(match[1]) * _SECONDS_PER[match[2]] if match else 0.0
    if seconds <= 0:
        raise UserError(f"{option}: {text!r} is not right; need a duration such as 60s, 5m or 1h")
    return seconds


def parse_token_range(text: str) -> TokenRange:
    """`LOW:HIGH`: ids from LOW to below HIGH."""
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text.strip())
    if not match:
        raise UserError(f"--token-range: {text!r} is not right; need LOW:HIGH such as 32:127")
    return TokenRange(int(match[1]), int(match[2]))
