"""A replay of a journal with another policy, as a page that a person reads. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from hisparsed.control.policy_replay import LeverReplay, Replay
from hisparsed.control.status_text import clock_text, setting_text
from hisparsed.policy.reasons import Lever
from hisparsed.policy.units import format_duration

_WIDTH = 80
_CAVEAT = (
    "The recording does not react to the other policy: the first difference of a lever is exact, "
    "later ones are hints."
)


def replay_text(replay: Replay) -> str:
    """The whole page, ending in a newline."""
    return "".join(f"{line}\n" for line in _lines(replay))


def _lines(replay: Replay) -> Iterator[str]:
    span = format_duration(max(0, round(replay.end_unix_s - replay.begin_unix_s)))
    runs = "1 run" if replay.runs == 1 else f"{replay.runs} runs"
    yield f"{replay.ticks:,} ticks of {runs} over {span}, from {clock_text(replay.begin_unix_s)}"
    if replay.unreadable:
        yield f"{replay.unreadable:,} ticks could not be read and are left out"
    if not replay.parted:
        yield "Both policies decide the same in every tick."
        return
    yield f"{replay.parted:,} ticks are decided differently."
    yield from textwrap.wrap(_CAVEAT, _WIDTH)
    for one in replay.first:
        yield ""
        yield f"{clock_text(one.at_unix_s)}  tick {one.tick}  {one.lever}"
        yield f"    recorded  {one.recorded}, wanted {setting_text(one.recorded_wanted)}"
        yield f"    replayed  {one.replayed}, wanted {setting_text(one.replayed_wanted)}"
        yield from textwrap.wrap(
            one.sentence, _WIDTH, initial_indent=" " * 14, subsequent_indent=" " * 14
        )
    for lever, found in replay.levers.items():
        yield ""
        yield from _lever(lever, found)


def _lever(lever: Lever, found: LeverReplay) -> Iterator[str]:
    yield f"{lever}: {found.parted:,} ticks differ"
    yield f"    moves  {found.recorded_moves:,} recorded, {found.replayed_moves:,} replayed"
    yield (
        f"    at the end  {setting_text(found.recorded_last)} recorded, "
        f"{setting_text(found.replayed_last)} replayed"
    )
    names = dict.fromkeys([*found.recorded_reasons, *found.replayed_reasons])
    for name in names:
        before, after = found.recorded_reasons.get(name, 0), found.replayed_reasons.get(name, 0)
        yield f"    {name:24} {before:>9,} {after:>9,}"
