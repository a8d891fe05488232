"""Families of sessions that share prompts, and parts of a trace that keep them whole.

A part of a node serves a part of the traffic. If sessions are drawn one by one, most of what two of
them share is lost: in recorded chat each turn is a separate session. Therefore families are drawn.
Two sessions belong to one family if they share more than a *common beginning*, a block of so common
a prompt that each part has enough sessions with it anyway (a system prompt).

Families differ in size, and a large one is more than its part's share for as long as it lasts.
Therefore they are not drawn at random: the largest are placed first, each where it leaves the parts
most equal in tokens, new blocks, answers and calls, over minutes and over longer spans, and small
ones fill what is left. The cost is n log n in sessions. Pure; equal seeds give equal parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random

from hisparsed.replay.trace import Call, Session, block_ids

COMMON_SHARE = 0.01
"""A block that more sessions have begins too many of them to keep them in one part."""
COMMON_SESSIONS = 64
"""At least this many: in a short trace a conversation is not a common beginning. The longest of
12,031 recorded chat calls has 43."""
_SPAN_S = 60.0
"""Parts are compared over spans of this length, twice, four times, and so on."""

Family = tuple[int, ...]
"""Places of its sessions in the trace, ascending."""


def prompt_blocks(call: Call) -> Iterator[int]:
    """The ids of all blocks of a prompt, the last one, which is not full, included."""
    yield from block_ids(call.blocks)
    yield call.tail_block


def families_of(sessions: Sequence[Session]) -> tuple[Family, ...]:
    """Every session in exactly one family, in the order of their first sessions."""
    holders: Counter[int] = Counter()
    for session in sessions:
        holders.update({block for call in session.calls for block in prompt_blocks(call)})
    most = max(COMMON_SESSIONS, int(COMMON_SHARE * len(sessions)))
    # A block stands for all that is before it: sessions that share anything beyond the common
    # beginning share the first block beyond it.
    parents = list(range(len(sessions)))
    first_with: dict[int, int] = {}
    for place, session in enumerate(sessions):
        for call in session.calls:
            own = next((block for block in prompt_blocks(call) if holders[block] <= most), None)
            if own is not None:
                other, this = (
                    _root(parents, first_with.setdefault(own, place)),
                    _root(parents, place),
                )
                parents[max(other, this)] = min(other, this)
    members: dict[int, list[int]] = {}
    for place in range(len(sessions)):
        members.setdefault(_root(parents, place), []).append(place)
    return tuple(tuple(one) for one in members.values())


def _root(parents: list[int], place: int) -> int:
    while parents[place] != place:
        parents[place] = parents[parents[place]]
        place = parents[place]
    return place


def parts_of(share: Fraction) -> tuple[Fraction, ...]:
    """Shares of the parts of a trace of which each but the last has ``share``."""
    whole = int(1 / share)
    rest = 1 - whole * share
    return (*(share,) * whole, *((rest,) if rest else ()))


def split(
    sessions: Sequence[Session], shares: Sequence[Fraction], seed: int
) -> tuple[tuple[int, ...], ...]:
    """Places of the sessions of each part, ascending: whole families, each in one part.

    ``shares`` are of the trace's tokens.
    """
    weights = _family_weights(sessions)
    draw = Random(f"{seed} families")
    # Large ones first; by powers of two, so that seeds differ.
    ordered = sorted(weights, key=lambda one: (-one.tokens.bit_length(), draw.random(), one.family))
    found = [
        tuple(sorted(place for one in part for place in one.family))
        for part in _divide(ordered, list(shares))
    ]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Weighed:
    """A family and its part of each span of time: (kind, span, number of it) -> its share of
    the trace's."""

    family: Family
    tokens: int
    adds: dict[tuple[int, int, int], float]


def _family_weights(sessions: Sequence[Session]) -> list[_Weighed]:
    asked = [_tokens(session) for session in sessions]
    fresh = [0] * len(sessions)
    seen: set[int] = set()
    for place in sorted(range(len(sessions)), key=lambda one: sessions[one].start_s):
        before = len(seen)
        for call in sessions[place].calls:
            seen.update(prompt_blocks(call))
        fresh[place] = len(seen) - before
    answers = [sum(call.output_tokens for call in session.calls) for session in sessions]
    calls = [len(session.calls) for session in sessions]
    kinds = [(values, max(1, sum(values))) for values in (asked, fresh, answers, calls)]
    widths = _widths(max((session.start_s for session in sessions), default=0.0))
    found = []
    for family in families_of(sessions):
        adds: dict[tuple[int, int, int], float] = {}
        for place in family:
            for kind, (values, total) in enumerate(kinds):
                for span, width in enumerate(widths):
                    key = (kind, span, int(sessions[place].start_s // width))
                    adds[key] = adds.get(key, 0.0) + values[place] / total
        found.append(_Weighed(family, sum(asked[place] for place in family), adds))
    return found


def _widths(length_s: float) -> list[float]:
    widths = [_SPAN_S]
    while widths[-1] <= length_s:
        widths.append(widths[-1] * 2)
    return widths


def _tokens(session: Session) -> int:
    return sum(call.input_tokens + max(1, call.output_tokens) for call in session.calls)


def _divide(ordered: list[_Weighed], shares: list[Fraction]) -> list[list[_Weighed]]:
    """In halves of the parts, and these again."""
    if len(shares) == 1:
        return [ordered]
    middle = len(shares) // 2
    left = float(sum(shares[:middle]) / sum(shares))
    ahead: dict[tuple[int, int, int], float] = {}
    sides: tuple[list[_Weighed], list[_Weighed]] = ([], [])
    for one in ordered:
        # What the left side has beyond its share, squared and summed: less if it goes left?
        cost = sum(
            2 * ahead.get(key, 0.0) * adds + adds * adds * (1 - 2 * left)
            for key, adds in one.adds.items()
        )
        goes_left = cost < 0 or (cost == 0 and len(sides[0]) <= len(sides[1]))
        sides[0 if goes_left else 1].append(one)
        for key, adds in one.adds.items():
            ahead[key] = ahead.get(key, 0.0) + adds * (1 - left if goes_left else -left)
    return [*_divide(sides[0], shares[:middle]), *_divide(sides[1], shares[middle:])]


def seen_share(prompts: Iterable[Iterable[object]]) -> float:
    """Share of blocks that occurred before: the hits of a cache that loses nothing; 0 for none."""
    seen: set[object] = set()
    blocks = 0
    for prompt in prompts:
        for block in prompt:
            blocks += 1
            seen.add(block)
    return 1 - len(seen) / blocks if blocks else 0.0
