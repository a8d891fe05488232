"""The policy as plain text: values, changes, problems, decisions and replays. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hisparsed.control.journal.records import DecisionView, EventView
from hisparsed.control.journal.replay import LeverReplay, Replay
from hisparsed.control.text.status import clock_text, setting_text
from hisparsed.policy.forecasts import Outcome, error_shares
from hisparsed.policy.keys import settable_keys
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Lever
from hisparsed.policy.units import counted, format_bytes, format_duration, format_fraction

_HASH_SHOWN = 12


def policy_text(answer: Mapping[str, Any], *, now_unix_s: float, every: bool) -> str:
    """The answer of `GET /v1/policy` as a page; without ``every`` defaults are omitted."""
    return "".join(f"{line}\n" for line in _policy_lines(answer, now_unix_s, every))


def _policy_lines(answer: Mapping[str, Any], now_unix_s: float, every: bool) -> Iterator[str]:
    yield f"file        {answer['file']}"
    yield (
        f"generation  {answer['generation']} ({answer['content_hash'][:_HASH_SHOWN]}), document of "
        f"{clock_text(answer['loaded_unix_s'])}"
    )
    if answer["schedules"]:
        marks = (f"{one['name']}{' (active)' * one['active']}" for one in answer["schedules"])
        yield f"schedules   {', '.join(marks)}"
    for one in answer["pending_restart"]:
        yield (
            f"RESTART     {one['key']} runs as {one['running']}; {one['wanted']} needs a restart"
        )
    if answer["rejected"] is not None:
        rejected = answer["rejected"]
        yield f"REJECTED    {clock_text(rejected['at_unix_s'])}, asked by {rejected['actor']}:"
        yield from (f"            {line}" for line in rejected["error"].splitlines())
    yield ""
    defaults = Policy.model_validate({"version": 1})
    shown = {
        key: value
        for key, value in answer["values"].items()
        if every
        or answer["sources"][key]["from"] in ("schedule", "override")
        or key not in settable_keys()
        or settable_keys()[key].text(defaults) != value
    }
    wide, broad = _widths(shown)
    held = {one["key"] for one in answer["overrides"]}
    for key, value in shown.items():
        source = answer["sources"][key]
        words = _source(source, now_unix_s)
        if source["from"] == "override" and key not in held:
            words = f"mode set by {source['actor']}, until it is set back or the daemon ends"
        yield f"{key:{wide}}  {value:{broad}}  {words}"
    left_out = len(answer["values"]) - len(shown)
    if left_out:
        yield f"{left_out} more keys have their default; --all shows them."


def _source(source: Mapping[str, Any], now_unix_s: float) -> str:
    origin = source["from"]
    if origin == "document":
        return f"line {source['line']}"
    if origin == "schedule":
        return f"schedule {source['schedule']}, line {source['line']}"
    if origin == "override":
        expires = source["expires_unix_s"]
        if expires is None:
            return f"set by {source['actor']} until it is unset"
        left = format_duration(max(0, round(expires - now_unix_s)))
        return f"set by {source['actor']}, {left} left"
    return str(origin)


def changes_text(changes: Sequence[Mapping[str, Any]]) -> str:
    """The changes that a document would make, one line per key."""
    if not changes:
        return "Nothing would change.\n"
    wide, broad = _widths({one["key"]: one["active"] or "none" for one in changes})
    return "".join(
        f"{one['key']:{wide}}  {one['active'] or 'none':{broad}}  ->  {one['new'] or 'none'}\n"
        for one in changes
    )


def judgement_text(
    file: str, answer: Mapping[str, Any], *, node: str | None, not_compared: str
) -> str:
    """Whether ``file`` could be the policy, with every problem and every change.

    ``node`` names the node that judged; where it is ``None``, ``not_compared`` says why none did.
    """
    lines = []
    for one in answer["problems"]:
        place = f"{file}:{one['line']}" if one["line"] else file
        key = f"{one['key']}: " if one["key"] else ""
        lines.append(f"{place}: {key}{one['message']}")
    if answer["ok"]:
        lines.append(f"{file} is valid.")
        if node is None:
            lines += [
                f"Not compared: the sizes of a node, and the policy in force ({not_compared}).",
            ]
        else:
            changes = answer["changes"]
            would = f"it would change {_count(changes)}{':' if changes else '.'}"
            lines.append(f"The node on {node} could run it; {would}")
            lines += [f"    {line}" for line in changes_text(changes).splitlines() if changes]
            lines += [left_out_text(keys) for keys in (answer.get("left_out"),) if keys]
    return "".join(f"{line}\n" for line in lines)


_MOST_NAMED = 12


def left_out_text(keys: Sequence[str]) -> str:
    """The keys that a document no longer gives; only the first ones if there are many."""
    named = ", ".join(keys[:_MOST_NAMED])
    more = len(keys) - _MOST_NAMED
    others = f" and {more} more" if more > 0 else ""
    verb = "returns to its default" if len(keys) == 1 else "return to their defaults"
    return f"{counted(len(keys), 'key')} {verb}: {named}{others}."


def _count(changes: Sequence[object]) -> str:
    return {0: "nothing", 1: "1 key"}.get(len(changes), f"{len(changes)} keys")


def _widths(rows: Mapping[str, str]) -> tuple[int, int]:
    return (
        max((len(key) for key in rows), default=0),
        min(24, max((len(value) for value in rows.values()), default=0)),
    )


_WIDTH = 100
_LEAST_WIDTH = 40
_INDENT = "    "
_NAMES = {"gpu": "GPU", "pcie": "PCIe", "hisparse": "HiSparse"}


def explanation(
    decisions: Iterable[DecisionView], events: Iterable[EventView], *, width: int = _WIDTH
) -> str:
    """Both in order of time, ending in a newline; empty when there is nothing.

    Then the errors of the predictions of those moves that are judged in it. Sentences are wrapped
    to ``width`` columns.
    """
    width = max(width, _LEAST_WIDTH)
    decisions, order = list(decisions), list(Lever)
    entries = [
        ((one.at_unix_s, one.sequence, order.index(one.lever)), list(_decision(one, width)))
        for one in decisions
    ]
    entries += [((one.at_unix_s, one.sequence, 0), list(_event(one, width))) for one in events]
    entries.sort(key=lambda entry: entry[0])
    shown = [line for _, lines in entries for line in lines]
    judged = error_shares(
        (one.lever, one.outcome.errors) for one in decisions if one.outcome is not None
    )
    if judged:
        shown += ["", "Expected against what came, of the moves judged above:"]
        shown += [f"{_INDENT}{one.text}" for one in judged]
    return "".join(f"{line}\n" for line in shown)


def _decision(view: DecisionView, width: int) -> Iterator[str]:
    limited = f", {view.limited_by}" if view.limited_by not in (None, view.code) else ""
    mark = "moved" if view.acts else "held"
    if view.error is not None:
        mark = "failed"
    yield f"{clock_text(view.at_unix_s)}  {view.lever}  {mark}  {view.code}{limited}"
    yield from _wrapped(view.sentence, width)
    if view.error is not None:
        yield from _wrapped(f"The engine refused: {view.error}.", width)
    if view.in_force is not None:
        yield from _wrapped(f"The engine bounded it to {setting_text(view.in_force)}.", width)
    if view.expected:
        expected = {str(name): value for name, value in view.expected.items()}
        yield from _wrapped(f"Expected: {figures_text(expected)}.", width)
    if view.outcome is not None:
        yield from _wrapped(_outcome(view.outcome), width)
    if view.figures:
        yield from _wrapped(figures_text(view.figures), width)


def _outcome(outcome: Outcome) -> str:
    parts = [
        f"{_figure(name, outcome.came[name])} for {_figure(name, value)} expected, "
        f"off by {format_fraction(round(outcome.errors[name], 2))}"
        for name, value in outcome.expected.items()
    ]
    return (
        f"Came of {setting_text(outcome.current)} to {setting_text(outcome.wanted)}, "
        f"{format_duration(round(outcome.age_s))} ago, over {format_duration(outcome.window_s)}: "
        f"{'; '.join(parts)}."
    )


def _event(view: EventView, width: int) -> Iterator[str]:
    yield f"{clock_text(view.at_unix_s)}  {view.kind}  by {view.actor}"
    for line in view.sentence.splitlines():
        # A quoted line of a document, with its mark below, stays as it is.
        yield from [f"{_INDENT}{line}"] if line.startswith("  ") else _wrapped(line, width)


def figures_text(figures: Mapping[str, float] | Mapping[str, float | None]) -> str:
    """Names in words, each value in the unit that its name ends in."""
    return ", ".join(_figure(name, value) for name, value in figures.items())


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return f"{_words(name)} unlimited"
    if name.endswith("_bytes_per_s"):
        return f"{_words(name.removesuffix('_bytes_per_s'))} {format_bytes(round(value))}/s"
    if name.endswith("_per_s"):
        return f"{_words(name.removesuffix('_per_s'))} {_number(value)}/s"
    if name.endswith("_bytes"):
        return f"{_words(name.removesuffix('_bytes'))} {format_bytes(round(value))}"
    for seconds in ("_seconds", "_s"):
        if name.endswith(seconds):
            return f"{_words(name.removesuffix(seconds))} {format_duration(value)}"
    if name.endswith("_ratio"):
        return f"{_words(name.removesuffix('_ratio'))} {format_fraction(value)}"
    return f"{_words(name)} {_number(value)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.4g}"


def _words(name: str) -> str:
    return " ".join(_NAMES.get(word, word) for word in name.split("_"))


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


_REPLAY_WIDTH = 80
_CAVEAT = (
    "The recording does not react to the other policy: the first difference of a lever is exact, "
    "later ones are only hints."
)


def replay_text(replay: Replay) -> str:
    """The whole page, ending in a newline."""
    return "".join(f"{line}\n" for line in _replay_lines(replay))


def _replay_lines(replay: Replay) -> Iterator[str]:
    span = format_duration(max(0, round(replay.end_unix_s - replay.begin_unix_s)))
    runs = "1 run" if replay.runs == 1 else f"{replay.runs} runs"
    yield f"{replay.ticks:,} ticks of {runs} over {span}, from {clock_text(replay.begin_unix_s)}"
    if replay.unreadable:
        yield f"{replay.unreadable:,} ticks could not be read and are skipped"
    if not replay.parted:
        yield "Both policies decide the same in every tick."
        return
    yield f"{replay.parted:,} ticks are decided differently."
    yield from textwrap.wrap(_CAVEAT, _REPLAY_WIDTH)
    for one in replay.first:
        yield ""
        lasts = ""
        if one.ticks > 1:
            lasts = f"  the same in {one.ticks:,} ticks, until {clock_text(one.last_unix_s)}"
        yield f"{clock_text(one.at_unix_s)}  tick {one.tick}  {one.lever}{lasts}"
        yield f"    recorded  {one.recorded}, wanted {setting_text(one.recorded_wanted)}"
        yield f"    replayed  {one.replayed}, wanted {setting_text(one.replayed_wanted)}"
        yield from textwrap.wrap(
            one.sentence, _REPLAY_WIDTH, initial_indent=" " * 14, subsequent_indent=" " * 14
        )
    for lever, found in replay.levers.items():
        yield ""
        yield from _replay_lever(lever, found)


def _replay_lever(lever: Lever, found: LeverReplay) -> Iterator[str]:
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
