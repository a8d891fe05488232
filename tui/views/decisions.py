"""The journal as rows: decisions and events, filtered, newest first; and the details of one.

A single decision shows its figures, the expected and the measured effect, and the snapshot that it
used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from hisparsed.policy.events import EventLevel, level_of
from hisparsed.policy.forecasts import error_of
from hisparsed.tui import format as fmt
from hisparsed.tui.model import NodeModel
from hisparsed.tui.styled import EMPTY, Line, Part, hanging, line, wrap
from hisparsed.tui.views.drawing import ViewContext
from hisparsed.tui.views.policy import LEVERS, setting_text, why_and_what
from hisparsed.tui.wire import Document, dig, finite, items, number, text

_VALUE = len("held-prefix-first")
EVENT_ROLES = {EventLevel.INFO: "accent", EventLevel.WARNING: "warn", EventLevel.ERROR: "bad"}


@dataclass(frozen=True, slots=True)
class Filter:
    """``None`` and empty let everything pass. Events are omitted where lever or code is set."""

    lever: str | None = None
    code: str | None = None
    search: str = ""
    every_tick: bool = False
    fold: bool = True
    """Whether holds of a lever that change their reason often are one row."""

    def passes(self, entry: Document) -> bool:
        if is_event(entry):
            if self.lever is not None or self.code is not None:
                return False
        else:
            if self.lever not in (None, entry.get("lever")):
                return False
            if self.code not in (None, entry.get("code")):
                return False
            if not self.every_tick and not (entry.get("notable") or entry.get("acts")):
                return False
        return not self.search or self.search.lower() in _words(entry)

    def next_lever(self) -> Filter:
        choices = (None, *LEVERS)
        return replace(self, lever=choices[(choices.index(self.lever) + 1) % len(choices)])

    @property
    def words(self) -> str:
        parts = [
            self.lever or "all levers",
            self.code or "all codes",
            "every tick" if self.every_tick else "moves and new reasons",
        ]
        if self.fold and not self.every_tick:
            parts.append("frequent changes of reason folded")
        if self.search:
            parts.append(f'"{self.search}"')
        return ", ".join(parts)


def is_event(entry: Document) -> bool:
    return "kind" in entry and "lever" not in entry


def event_level(entry: Document) -> EventLevel:
    """As the node serves it; by the kind for journals and for nodes that serve none."""
    served = text(entry, "level")
    return EventLevel(served) if served in _LEVELS else level_of(text(entry, "kind"))


_LEVELS = frozenset(EventLevel)


def codes(model: NodeModel) -> list[str]:
    """Those that occur, in alphabetical order."""
    return sorted({str(one["code"]) for one in model.decisions if one.get("code")})


def entries(model: NodeModel, wanted: Filter) -> list[Document]:
    """The entries that pass, newest first."""
    merged = sorted(
        [*model.decisions, *model.events],
        key=lambda one: (number(one, "at_unix_s") or 0.0, number(one, "sequence") or 0.0),
        reverse=True,
    )
    passed = [one for one in merged if wanted.passes(one)]
    return _folded(passed) if wanted.fold and not wanted.every_tick else passed


FLAPS_WITHIN_S = 60.0
"""Holds of one lever within this time of each other are one row, unless it moves in between."""


def _folded(entries: list[Document]) -> list[Document]:
    """Newest first; a row of several holds is the newest, with all of them in ``folded``."""
    rows: list[Document] = []
    groups: dict[object, tuple[int, list[Document]]] = {}
    for entry in entries:
        if is_event(entry):
            rows.append(entry)
            continue
        lever, at_s = entry.get("lever"), number(entry, "at_unix_s") or 0.0
        if entry.get("acts"):
            groups.pop(lever, None)
            rows.append(entry)
            continue
        place, held = groups.get(lever, (-1, []))
        if held and (number(held[-1], "at_unix_s") or 0.0) - at_s < FLAPS_WITHIN_S:
            held.append(entry)
            rows[place] = {**held[0], "folded": held}
        else:
            groups[lever] = (len(rows), [entry])
            rows.append(entry)
    return rows


def first_of(entry: Document) -> Document:
    """The oldest of the holds that a row stands for: it stays the same while newer ones arrive."""
    return items(entry, "folded")[-1] if entry.get("folded") else entry


def moves(model: NodeModel, count: int) -> list[Document]:
    """The latest decisions that act, and events; both rings are newest first."""
    heads = [
        *islice((one for one in model.decisions if one.get("acts")), count),
        *islice(model.events, count),
    ]
    heads.sort(key=lambda one: number(one, "at_unix_s") or 0.0, reverse=True)
    return heads[:count]


def entry_line(
    model: NodeModel, entry: Document, context: ViewContext, *, values: bool = True
) -> Line:
    """Time, what, whether it moved, why, and the sentence; ``values`` in their own column."""
    at = fmt.clock(number(entry, "at_unix_s"))
    if is_event(entry):
        kind = text(entry, "kind") or ""
        return line(
            (f"{at}  ", "dim"),
            (f"{'event':<11}", "title"),
            (f"{kind:<{27 if values else 22}} ", EVENT_ROLES[event_level(entry)]),
            text(entry, "sentence") or "",
        )
    acts, error = bool(entry.get("acts")), text(entry, "error")
    state = "FAILED" if error else "moved" if acts else "held"
    lever, code = text(entry, "lever") or "", text(entry, "code") or ""
    if count := len(items(entry, "folded")):
        code = f"{code} x{count}"
    return line(
        (f"{at}  ", "dim"),
        (f"{lever:<11}", "title"),
        (f"{state:<7}", "bad" if error else "good" if acts else "dim"),
        (f"{code:<20} ", "accent" if acts else ""),
        (
            f"{_change(model, entry, context):<{_VALUE}} " if values else "",
            "strong" if acts else "dim",
        ),
        *_reason_first(text(entry, "sentence") or ""),
    )


SENTENCE_AT = 49
"""Cells of a line with ``values`` before an event's sentence and before a decision's value."""


def _reason_first(sentence: str) -> tuple[Part, ...]:
    why, what = why_and_what(sentence)
    return (why, (f"; so {what}" if what else "", "dim"))


def entry_titles(*, values: bool) -> str:
    head = f"{'time':<10}{'lever':<11}{'':<7}{'code':<21}"
    return head + (f"{'value':<{_VALUE + 1}}why" if values else "why")


def entry_words(entry: Document, width: int) -> list[Line]:
    """The whole sentence; for a row of several holds also what they were."""
    lines = wrap(text(entry, "sentence") or "", width)
    folded = items(entry, "folded")
    if folded:
        counts = Counter(text(one, "code") or "" for one in folded)
        codes = ", ".join(f"{code} {count}x" for code, count in counts.most_common())
        since = fmt.clock(number(folded[-1], "at_unix_s"))
        lines.append(line((f"held since {since} for changing reasons: {codes}", "dim")))
    return lines


def _change(model: NodeModel, entry: Document, context: ViewContext) -> str:
    lever = text(entry, "lever") or ""
    current, wanted = dig(entry, "current"), dig(entry, "wanted")
    if lever == "admission":
        return fmt.setting(wanted)[:_VALUE]
    short = setting_text(model, lever, current).partition(" (")[0]
    if current == wanted:
        return short
    return f"{short}{context.glyphs.arrow}{setting_text(model, lever, wanted).partition(' (')[0]}"


def _words(entry: Document) -> str:
    names = ("kind", "lever", "code", "cause", "limited_by", "sentence", "actor")
    return " ".join(str(entry.get(name) or "") for name in names).lower()


_EFFECT = (
    ("hisparse reach (tokens)", "hisparse.capacity_blocks", "hisparse.in_use_blocks"),
    ("offload blocks lent", "offload.lent_blocks", None),
    ("multiplier", "hot.multiplier", None),
    ("GPU blocks free", "gpu.free_blocks", None),
    ("running", "requests.running", None),
    ("waiting", "requests.waiting", None),
    ("preemptions", "requests.preemptions_total", None),
    ("live set (tokens)", "sessions.live_set_tokens", None),
)
_RATES = (
    ("misses of hot references", "hot.loads_total", ("hot.loads_total", "hot.hits_total")),
    ("prefix hits", "prefix.hit_tokens_total", ("prefix.query_tokens_total",)),
)


def event_detail(entry: Document, width: int) -> list[Line]:
    return [
        line((text(entry, "kind") or "", "title")),
        line(("at     ", "dim"), fmt.moment(number(entry, "at_unix_s"))),
        line(("actor  ", "dim"), text(entry, "actor") or fmt.UNKNOWN),
        EMPTY,
        *wrap(text(entry, "sentence") or "", width),
    ]


def decision_detail(entry: Document, whole: Document | None, width: int) -> list[Line]:
    """``entry`` is the flat decision, ``whole`` its tick, or ``None`` if it is not known."""
    lines = [
        line((f"{entry.get('lever')} ", "title"), (str(entry.get("code")), "accent")),
        *wrap(text(entry, "sentence") or "", width),
        EMPTY,
        _pair("at", fmt.moment(number(entry, "at_unix_s"))),
        _pair("tick", f"{fmt.whole(number(entry, 'tick'))}, policy generation "
              f"{entry.get('policy_generation')} ({str(entry.get('policy_hash'))[:12]})"),
        _pair("current", fmt.setting(entry.get("current"))),
        _pair("wanted", fmt.setting(entry.get("wanted"))),
    ]  # fmt: skip
    if entry.get("in_force") is not None:
        lines.append(_pair("in force", f"{fmt.setting(entry['in_force'])} (bounded by the engine)"))
    if entry.get("cause") != entry.get("code"):
        lines.append(_pair("cause", str(entry.get("cause"))))
    if entry.get("limited_by"):
        lines.append(_pair("limited by", str(entry["limited_by"])))
    if entry.get("error"):
        lines += [line(("failed", "bad")), *wrap(str(entry["error"]), width, "bad")]
    if folded := items(entry, "folded"):
        lines += [EMPTY, line((f"the last {len(folded)} holds, newest first", "title"))]
        for one in folded:
            head = line(
                (f"  {fmt.clock(number(one, 'at_unix_s'))}  ", "dim"),
                f"{text(one, 'code') or '':<20} ",
            )
            lines += hanging(head, why_and_what(text(one, "sentence") or "")[0], width)
    if expected := dig(entry, "expected"):
        lines += [EMPTY, line(("expected of this move", "title")), *_figures(expected)]
    if isinstance(outcome := entry.get("outcome"), dict):
        lines += [EMPTY, *_outcome(outcome)]
    lines += [EMPTY, line(("figures", "title"))]
    lines += _figures(dig(entry, "figures"))
    if whole is not None:
        lines += [EMPTY, line(("effect", "title")), *_measured(whole)]
        lines += [EMPTY, line(("snapshot", "title")), *_flat(dig(whole, "snapshot"))]
    return lines


def _pair(name: str, value: str, role: str = "") -> Line:
    return line((f"{name:<12}", "dim"), (value, role))


def _figures(figures: object) -> list[Line]:
    if not isinstance(figures, dict) or not figures:
        return [line(("none", "dim"))]
    return [
        line((f"  {name:<36}", "dim"), f"{_exact(value):>20}") for name, value in figures.items()
    ]


def _outcome(outcome: Document) -> list[Line]:
    """Expected and measured results of an earlier move."""
    head = (
        f"results of the move from {fmt.setting(outcome.get('current'))} to "
        f"{fmt.setting(outcome.get('wanted'))}"
    )
    lines = [
        line((head, "title")),
        line((f"  {'':<36}{'expected':>20}{'came':>20}{'off by':>9}", "dim")),
    ]
    expected = dig(outcome, "expected")
    for name in expected if isinstance(expected, dict) else {}:
        wanted, came = number(expected, name), number(outcome, f"came.{name}")
        off = fmt.UNKNOWN
        if wanted is not None and came is not None:
            off = f"{error_of(wanted, came):.0%}"
        lines.append(
            line((f"  {name:<36}", "dim"), f"{_exact(wanted):>20}{_exact(came):>20}{off:>9}")
        )
    return lines


def _measured(whole: Document) -> list[Line]:
    applied, confirmation = dig(whole, "applied"), dig(whole, "confirmation")
    lines = []
    if applied is None:
        lines.append(line("  nothing was sent to the engine"))
    elif text(applied, "error"):
        lines.append(line(("  the engine refused: ", "bad"), text(applied, "error") or ""))
    elif confirmation is None:
        lines.append(line("  applied; no later report has confirmed it"))
    else:
        differences = items(confirmation, "differences")
        lines += [
            line(
                (f"  did not take effect: {one.get('lever')} ", "warn"),
                f"wanted {fmt.setting(one.get('wanted'))}, found {fmt.setting(one.get('found'))}",
            )
            for one in differences
        ]
        if not differences:
            lines.append(line(("  confirmed by the next report", "good")))
    after = dig(whole, "after.snapshot")
    if not isinstance(after, dict):
        return lines
    passed_s = (number(whole, "after.at_unix_s") or 0) - (number(whole, "at_unix_s") or 0)
    then = f"after {fmt.duration(passed_s)}"
    lines.append(line((f"  {'':<30}{'then':>14}{then:>16}", "dim")))
    return [*lines, *_effect(dig(whole, "snapshot"), after)]


def _effect(before: object, after: object) -> Iterator[Line]:
    for name, path, less in _EFFECT:
        start, end = number(before, path), number(after, path)
        if less is not None:
            tokens = number(before, "geometry.block_tokens") or 1
            start = _minus(start, number(before, less), tokens)
            end = _minus(end, number(after, less), tokens)
        role = "" if start == end else "strong"
        yield line((f"  {name:<30}", "dim"), (f"{_exact(start):>14}{_exact(end):>16}", role))
    for name, top, bottom in _RATES:
        yield line(
            (f"  {name:<30}", "dim"),
            f"{'':>14}",
            (f"{fmt.percent(_ratio(before, after, top, bottom), 1):>16}", "strong"),
        )


def _minus(value: float | None, less: float | None, times: float) -> float | None:
    return None if value is None or less is None else (value - less) * times


def _ratio(before: object, after: object, top: str, bottom: tuple[str, ...]) -> float | None:
    def grown(path: str) -> float:
        return (number(after, path) or 0.0) - (number(before, path) or 0.0)

    whole = sum(grown(path) for path in bottom)
    return grown(top) / whole if whole > 0 else None


def _flat(document: object, prefix: str = "") -> list[Line]:
    """Every leaf as a dotted key and its value."""
    if not isinstance(document, dict):
        return []
    lines: list[Line] = []
    for name, value in document.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            lines += _flat(value, f"{key}.")
        elif isinstance(value, list):
            for index, one in enumerate(value):
                if isinstance(one, dict):
                    lines += _flat(one, f"{key}.{index}.")
                else:
                    lines.append(line((f"  {key}.{index:<34}", "dim"), f"{_exact(one)}"))
        else:
            lines.append(line((f"  {key:<36}", "dim"), f"{_exact(value):>20}"))
    return lines


def _exact(value: object) -> str:
    exact = finite(value)
    if exact is None:
        return fmt.setting(value)
    if exact == int(exact):
        return f"{exact:,.0f}"
    return f"{exact:,.4g}" if abs(exact) < 1000 else f"{exact:,.1f}"
