"""The policy, changes and problems as lines that a person reads; from the API's answers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hisparsed.control.status_text import clock_text
from hisparsed.policy.keys import settable_keys
from hisparsed.policy.schema import Policy
from hisparsed.policy.units import format_duration

_HASH_SHOWN = 12


def policy_text(answer: Mapping[str, Any], *, now_unix_s: float, every: bool) -> str:
    """The answer of `GET /v1/policy` as a page; without ``every`` defaults are left out."""
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
    """What a document would change, one line a key."""
    if not changes:
        return "Nothing would change.\n"
    wide, broad = _widths({one["key"]: one["active"] or "none" for one in changes})
    return "".join(
        f"{one['key']:{wide}}  {one['active'] or 'none':{broad}}  ->  {one['new'] or 'none'}\n"
        for one in changes
    )


def judgement_text(file: str, answer: Mapping[str, Any], *, node: str | None) -> str:
    """Whether ``file`` could be the policy, with every problem; ``node`` says who judged."""
    lines = []
    for one in answer["problems"]:
        place = f"{file}:{one['line']}" if one["line"] else file
        key = f"{one['key']}: " if one["key"] else ""
        lines.append(f"{place}: {key}{one['message']}")
    if answer["ok"]:
        lines.append(f"{file} is valid.")
        lines.append(
            "No daemon was asked, so the sizes of a node were not checked."
            if node is None
            else f"The node on {node} could run it; it would change {_count(answer['changes'])}."
        )
    return "".join(f"{line}\n" for line in lines)


def _count(changes: Sequence[object]) -> str:
    return {0: "nothing", 1: "1 key"}.get(len(changes), f"{len(changes)} keys")


def _widths(rows: Mapping[str, str]) -> tuple[int, int]:
    return (
        max((len(key) for key in rows), default=0),
        min(24, max((len(value) for value in rows.values()), default=0)),
    )
