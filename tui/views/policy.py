"""The policy in force: the levers, every value with its origin, and unusual states.

A lever shows its mode, its value, the wanted value and why it does not move.
"""

from __future__ import annotations

from dataclasses import dataclass

from hisparsed.policy.decisions import reason_of
from hisparsed.tui import format as fmt
from hisparsed.tui.model import NodeModel
from hisparsed.tui.styled import Line, fit, hanging, line, wrap
from hisparsed.tui.views.drawing import ViewContext
from hisparsed.tui.wire import Document, dig, items, number, text

LEVERS = ("split", "multiplier", "admission", "watermark")


def effective_mode(model: NodeModel) -> str:
    """The effective mode of the levers; the policy's mode if that is not known."""
    shown = text(model.status, "policy.effective") or text(model.status, "policy.mode")
    return shown or text(model.policy, "values.mode") or ""


def lever_lines(model: NodeModel, width: int, context: ViewContext, *, rows: int = 1) -> list[Line]:
    """One line per lever; with more rows, also its sentence."""
    found = items(model.status, "levers")
    if not found:
        return [line(("no decision yet", "dim"))]
    settings = [_setting(model, lever, context) for lever in found]
    column = max(len(one) for one in settings)
    lines: list[Line] = []
    for lever, setting in zip(found, settings, strict=True):
        lever_line = _lever_line(lever, f"{setting:<{column}}", why=rows == 1)
        lines.append(fit(lever_line, width, more=context.glyphs.more))
        if rows > 1:
            sentence = wrap(text(lever, "sentence") or "", width - 2, "dim")[: rows - 1]
            lines += [line("  ") + one for one in sentence]
    return lines


def _setting(model: NodeModel, lever: Document, context: ViewContext) -> str:
    """The value in force, and the wanted one."""
    current, wanted = dig(lever, "current"), dig(lever, "wanted")
    name = text(lever, "lever") or ""
    shown = _shown(model, name, current)
    if wanted == current:
        return shown
    return f"{shown} {context.glyphs.arrow} {_shown(model, name, wanted)}"


def _lever_line(lever: Document, setting: str, *, why: bool) -> Line:
    """The reason is at the end, with its code first, so that a cut line still shows the code."""
    mode, reason = text(lever, "mode") or "", text(lever, "reason") or ""
    name = text(lever, "lever") or ""
    known = reason_of(reason)
    moves = dig(lever, "current") != dig(lever, "wanted") or (known is not None and known.acts)
    limited = text(lever, "limited_by")
    words, _ = why_and_what(text(lever, "sentence") or "") if why else ("", "")
    return line(
        (f"{name:<11}", "title"),
        (f"{mode:<7}", "" if mode == "act" else "warn"),
        (f"{setting}  ", "strong"),
        ("FROZEN " if dig(lever, "frozen") else "", "warn"),
        ("NEEDS RESTART " if dig(lever, "pending_restart") else "", "warn"),
        (reason, "accent" if moves else ""),
        (f" (limited: {limited})" if limited and limited != reason else "", "dim"),
        (f": {words}" if words else "", "dim"),
    )


_HELD = ("Hold", "Leave")
"""The beginnings of sentences that hold a lever, with the reason after a colon."""


def why_and_what(sentence: str) -> tuple[str, str]:
    """A decision's sentence in two: the reason, and what is done or kept because of it.

    For tables, whose lines may be cut: they begin with the reason.
    """
    body = sentence.strip().removesuffix(".")
    what, because, why = body.partition(", because ")
    if because:
        return why, what[:1].lower() + what[1:]
    head, colon, rest = body.partition(": ")
    if colon and head.split(" ")[0] in _HELD:
        return rest, ""
    return body, ""


def _shown(model: NodeModel, lever: str, value: object) -> str:
    if lever == "multiplier" and isinstance(value, int | float):
        return fmt.multiplier(value)
    if lever == "split" and isinstance(value, int | float):
        block = number(model.observed, "geometry.host_block_bytes")
        whole = f"{value:,.0f}"
        return f"{whole} ({fmt.size(value * block)})" if block else whole
    return fmt.setting(value)


def setting_text(model: NodeModel, lever: str, value: object) -> str:
    """A lever's value with its size where it has one."""
    return _shown(model, lever, value)


_HASH_SHOWN = 12
KEY_WIDTH = 40
VALUE_WIDTH = 20


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """``origin`` is for people; ``overridden`` values can be unset."""

    key: str
    value: str
    origin: str
    overridden: bool = False


def policy_rows(model: NodeModel, search: str = "", *, now_s: float = 0.0) -> list[PolicyRow]:
    """In the order of the document. For nodes that do not report origins none are shown."""
    document = model.policy or {}
    values, sources = document.get("values"), document.get("sources")
    if not isinstance(values, dict):
        values, sources = _flat(document.get("value")), {}
    held = {text(one, "key") for one in items(document, "overrides")}
    rows = []
    for key, value in values.items():
        source = sources.get(key) if isinstance(sources, dict) else None
        overridden, origin = text(source, "from") == "override", _origin(source, now_s)
        if overridden and key not in held:
            # A mode of a lever: it ends with the daemon, and nothing holds a value for the key.
            overridden = False
            origin = f"mode set by {text(source, 'actor') or fmt.UNKNOWN}; m sets it back"
        row = PolicyRow(str(key), fmt.setting(value), origin, overridden)
        if not search or search.lower() in f"{row.key} {row.value} {row.origin}".lower():
            rows.append(row)
    return rows


def policy_row_line(model: NodeModel, row: PolicyRow, width: int) -> Line:
    role = "warn" if row.overridden else ""
    plain = row.origin in ("default", "document")
    wide = width >= _MEANINGS_FROM
    origin = f"{row.origin:<{_ORIGIN_WIDTH}} " if wide else row.origin
    about = dig(model.keys, "keys")
    meaning = text(about.get(row.key), "meaning") if wide and isinstance(about, dict) else None
    return line(
        (f"{row.key:<{KEY_WIDTH}} ", role),
        (f"{row.value:<{VALUE_WIDTH}} ", "strong"),
        (origin, "dim" if plain else role or "accent"),
        ((meaning or "").replace("`", ""), "dim"),
    )


_MEANINGS_FROM = 110
"""The width in cells from which rows have room for what a key means."""
_ORIGIN_WIDTH = 16


def policy_titles(width: int) -> str:
    """The line above the rows."""
    head = f"{'key':<{KEY_WIDTH + 1}}{'value':<{VALUE_WIDTH + 1}}"
    return (
        f"{head}{'from':<{_ORIGIN_WIDTH + 1}}meaning" if width >= _MEANINGS_FROM else f"{head}from"
    )


def key_lines(model: NodeModel, key: str, width: int) -> list[Line]:
    """Allowed values of a key, its default, when it takes effect, and its meaning."""
    keys = dig(model.keys, "keys")
    about = keys.get(key) if isinstance(keys, dict) else None
    if not isinstance(about, dict):
        why = "this node does not say" if model.keys is None else "not a key that can be set"
        return [line((f"{key}: ", "title"), (f"what it means: {why}", "dim"))]

    def words(name: str) -> str:
        return (text(about, name) or fmt.UNKNOWN).replace("`", "")

    facts = f"{words('values')}; default {words('default')}; takes effect: {words('applies')}"
    return [*hanging(line((f"{key}  ", "title")), facts, width), *wrap(words("meaning"), width)]


def summary_lines(model: NodeModel, width: int, context: ViewContext) -> list[Line]:
    """File and generation; then rejected reload, pending restarts, overrides, schedules."""
    document, status = model.policy or {}, model.status
    path = text(document, "file") or text(document, "path") or text(status, "policy.path")
    content_hash = text(document, "content_hash") or text(status, "policy.content_hash") or ""
    if dig(status, "recorded") and not document:
        why = "this journal does not hold the policy: daemons before 0.2 kept its hash only"
        return [line((why, "dim"))]
    place = line(("policy ", "dim"), (path or fmt.UNKNOWN, "strong"))
    version = line(
        (f"generation {fmt.setting(model.generation)} ({content_hash[:_HASH_SHOWN]})", "dim"),
        ("  mode ", "dim"), (effective_mode(model) or fmt.UNKNOWN, "strong"),
        (_loaded(document), "dim"),
    )  # fmt: skip
    fits = place.cells + 2 + version.cells <= width
    lines = [place + line("  ") + version] if fits else [place, version]
    lines += _rejected(model, width)
    for item in items(document, "pending_restart"):
        lines.append(
            line(
                ("NEEDS RESTART ", "warn"), (f"{item.get('key')}: ", "strong"),
                f"runs with {fmt.setting(item.get('running'))}, "
                f"the policy wants {fmt.setting(item.get('wanted'))}",
            )
        )  # fmt: skip
    for item in items(document, "overrides"):
        lines.append(
            line(
                ("OVERRIDE ", "warn"),
                (f"{item.get('key')} = {fmt.setting(item.get('value'))}", "strong"),
                f" by {item.get('actor')}{_until(item, context.now_s)}",
            )
        )
    modes = dig(status, "policy.overridden")
    if isinstance(modes, dict) and modes:
        words = ", ".join(f"{lever} {mode}" for lever, mode in modes.items())
        lines.append(line(("MODES SET HERE ", "warn"), words))
    frozen = dig(status, "policy.frozen")
    if isinstance(frozen, list) and frozen:
        lines.append(line(("FROZEN ", "warn"), ", ".join(map(str, frozen))))
    active = [str(one.get("name")) for one in items(document, "schedules") if one.get("active")]
    if active:
        lines.append(line(("SCHEDULE IN FORCE ", "accent"), ", ".join(active)))
    return lines


def _loaded(document: Document) -> str:
    at = number(document, "loaded_unix_s")
    return "" if at is None else f"  loaded {fmt.moment(at)}"


def _rejected(model: NodeModel, width: int) -> list[Line]:
    document, status = model.policy or {}, model.status
    error = text(document, "rejected.error") or text(status, "policy.last_error")
    if error is None:
        return []
    at, actor = number(document, "rejected.at_unix_s"), text(document, "rejected.actor")
    who = f" at {fmt.clock(at)}" if at is not None else ""
    who += f", asked by {actor}" if actor else ""
    head = line(
        ("LAST RELOAD REJECTED", "bad"),
        f"{who}; generation {fmt.setting(model.generation)} stays in force",
    )
    return [head, *(one for raw in error.splitlines() for one in wrap(raw, width, "bad"))]


def _origin(source: object, now_s: float) -> str:
    kind = text(source, "from")
    if kind is None:
        return "policy"
    if kind == "document":
        at_line = number(source, "line")
        return f"line {at_line:.0f}" if at_line is not None else "document"
    if kind == "schedule":
        return f"schedule {text(source, 'schedule') or ''}".rstrip()
    if kind == "override":
        who = text(source, "actor")
        return f"override{f' by {who}' if who else ''}{_until(source, now_s)}"
    return kind


def _until(item: object, now_s: float) -> str:
    expires = number(item, "expires_unix_s")
    if expires is None:
        return ", until unset"
    left = f" ({fmt.duration(max(0.0, expires - now_s))} left)" if now_s else ""
    return f", until {fmt.clock(expires)}{left}"


def _flat(value: object, prefix: str = "") -> Document:
    if not isinstance(value, dict):
        return {}
    flat: Document = {}
    for name, one in value.items():
        if isinstance(one, dict):
            flat |= _flat(one, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = one
    return flat
