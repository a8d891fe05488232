"""How far two rounds of the same calls are apart, where sound cards differ: pure.

A card adds up in another order in another batch, and where two tokens are nearly as likely either
may come. So log probabilities may differ by a tolerance, which is learnt from two rounds that had
room, and a call may take another token only where the two were that close; what follows it is
another text and is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Answer = Sequence[tuple[int, Mapping[int, float]]]
"""Of one call: each token, and the log probabilities of the likeliest there, its own included."""
FLOOR = 0.02
"""Log probabilities of one sum in bfloat16 may be this far apart."""
CEILING = 0.5
"""An engine further from itself proves nothing."""
MARGIN = 4.0
LEAST_COMPARED = 0.5


@dataclass(frozen=True)
class Distance:
    """``largest``: of log probabilities of equal tokens; ``ties``: calls that went another way
    where two tokens were as likely."""

    largest: float
    compared: int
    ties: int


def tolerance_of(baseline: Distance) -> float:
    """The distance that other rounds may have. Raises ``AssertionError`` where it cannot be
    determined."""
    if baseline.largest > CEILING:
        raise AssertionError(
            f"with room the engine is {baseline.largest:.3g} from itself, over {CEILING:g}; no "
            "other round can prove anything here"
        )
    return max(FLOOR, MARGIN * baseline.largest)


def distance(
    one: Sequence[Answer], other: Sequence[Answer], name: str, tolerance: float
) -> Distance:
    """Raises ``AssertionError`` for what is further apart, or too short to prove anything."""
    largest, compared, ties = 0.0, 0, 0
    for call, (left, right) in enumerate(zip(one, other, strict=True)):
        for at, ((token, here), (found, there)) in enumerate(zip(left, right, strict=True)):
            if token != found:
                gap = here[token] - here.get(found, float("-inf"))
                if not gap <= tolerance:
                    raise AssertionError(
                        f"{name}: call {call} has another token at {at}, whose log probability "
                        f"is {gap:.3g} lower with room, over {tolerance:.3g}"
                    )
                ties += 1
                break
            off = abs(here[token] - there[found])
            if off > tolerance:
                raise AssertionError(
                    f"{name}: call {call}, token {at}: log probabilities differ by {off:.3g}, "
                    f"over {tolerance:.3g}"
                )
            largest, compared = max(largest, off), compared + 1
    whole = sum(len(answer) for answer in one)
    if compared < LEAST_COMPARED * whole:
        raise AssertionError(
            f"{name}: only {compared} of {whole} tokens could be compared before answers parted"
        )
    return Distance(largest, compared, ties)
