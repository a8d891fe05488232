"""The changes that an operator can ask of a node, each with a text that says what will happen.

Pure. Nothing is sent here; every change carries the policy generation that the operator saw.
"""

from __future__ import annotations

import getpass
import re
from dataclasses import dataclass, field

from hisparsed.tui import format as fmt
from hisparsed.tui.model import NodeModel
from hisparsed.tui.views.policy import LEVERS, setting_text
from hisparsed.tui.wire import Document, dig, items, text

MODES = ("act", "advise", "off")
UNTIL_UNSET = "until unset"
_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd])", re.ASCII)
_TIME = re.compile(rf"(?:{_PART.pattern})+", re.ASCII)
_MODE_MEANS = {
    "act": "moves again, as far as the policy document allows",
    "advise": "is still decided and explained, but nothing of it is sent to the engine",
    "off": "is left alone: no decisions, no moves",
}


@dataclass(frozen=True, slots=True)
class ChangeRequest:
    """One ``POST``. ``consequences`` are sentences for the confirmation."""

    title: str
    consequences: tuple[str, ...]
    path: str
    body: Document = field(default_factory=dict)


def actor() -> str:
    """The actor, for the journal."""
    try:
        return f"{getpass.getuser()} (top)"
    except (KeyError, OSError):
        return "unknown (top)"


def request_body(change: ChangeRequest, generation: int | None) -> Document:
    """The body to send: the change, the actor, and the policy generation that they saw."""
    body: Document = {"actor": actor(), **change.body}
    if generation is not None:
        body["expected_generation"] = generation
    return body


def answer_words(answer: Document) -> str:
    """The result of a change, from the node's answer."""
    if (findings := answer.get("findings")) is not None:
        return _doctor_words(answer, findings)
    words = "done; it takes effect at the next tick"
    if text(answer, "outcome") == "unchanged":
        words = "the document has not changed since it was loaded"
    not_kept = text(answer, "not_kept")
    return words if not_kept is None else f"{words}. It will not survive a restart: {not_kept}"


def _doctor_words(answer: Document, findings: object) -> str:
    error = text(answer, "error")
    if error is not None:
        return error
    count = len(findings) if isinstance(findings, list) else 0
    if not count:
        return "the doctor finds nothing wrong"
    return f"the doctor looked: {count} finding{'s' if count > 1 else ''}, see d"


def reload(model: NodeModel) -> ChangeRequest:
    path = text(model.policy, "file") or text(model.policy, "path") or "the policy file"
    return ChangeRequest(
        "Reload the policy",
        (
            f"The node reads {path} again. A valid document takes effect at the next tick, as a "
            f"new generation after {model.generation}.",
            "An invalid document is rejected with line and key; the policy in force stays.",
        ),
        "/v1/policy/reload",
    )


def freeze(model: NodeModel, lever: str) -> ChangeRequest:
    return ChangeRequest(
        f"Freeze {lever}",
        (
            f"{lever} stays at {_current(model, lever)} until it is thawed or the daemon ends; a "
            "reload does not thaw it.",
            "The policy still decides and explains, with the reason Frozen.",
        ),
        "/v1/freeze",
        {"levers": [lever]},
    )


def thaw(model: NodeModel, lever: str) -> ChangeRequest:
    return ChangeRequest(
        f"Thaw {lever}",
        (f"{lever} may move again from the next tick; it is at {_current(model, lever)} now.",),
        "/v1/thaw",
        {"levers": [lever]},
    )


def freeze_all(model: NodeModel) -> ChangeRequest:
    """Freezes every lever, or thaws them where all are frozen."""
    if len(frozen_levers(model)) < len(LEVERS):
        return ChangeRequest(
            "Freeze all levers",
            (
                "All levers stay where they are until they are thawed or the daemon ends; a reload "
                "does not thaw them. Calls are served as before.",
                "The policy still decides and explains, with the reason Frozen.",
            ),
            "/v1/freeze",
            {"levers": list(LEVERS)},
        )
    return ChangeRequest(
        "Thaw all levers",
        ("All levers may move again from the next tick, as far as their modes allow.",),
        "/v1/thaw",
        {"levers": list(LEVERS)},
    )


def set_mode(lever: str, mode: str | None) -> ChangeRequest:
    if mode is None:
        words: tuple[str, ...] = (f"{lever} goes back to the mode that the policy document says.",)
        title = f"{lever}: mode of the document"
    else:
        words = (
            f"{lever} {_MODE_MEANS[mode]}.",
            "This holds until it is set back or the daemon ends. The more cautious of this and "
            "the document counts, so the document can refuse it.",
        )
        title = f"{lever}: {mode}"
    return ChangeRequest(title, words, "/v1/mode", {"levers": [lever], "mode": mode})


def set_value(key: str, before: str, value: str, seconds: float | None) -> ChangeRequest:
    """``seconds`` is ``None`` for "until it is unset"."""
    until = f"for {fmt.duration(seconds)}" if seconds is not None else "until it is unset"
    after = (
        "then the policy document applies again" if seconds is not None else "it survives reloads"
    )
    return ChangeRequest(
        f"Set {key} to {value}",
        (
            f"{key} goes from {before} to {value} from the next tick, {until}; {after}.",
            "The policy file is not changed. A value that the policy may not have is refused.",
        ),
        "/v1/policy/set",
        {"key": key, "value": value, "for_s": seconds},
    )


def unset(key: str) -> ChangeRequest:
    return ChangeRequest(
        f"Unset {key}",
        (f"{key} goes back to the value of the policy document at the next tick.",),
        "/v1/policy/unset",
        {"key": key},
    )


def look_again() -> ChangeRequest:
    return ChangeRequest(
        "Run the doctor again",
        (
            "The node looks at what can change while it runs: memory, what dead engines left in "
            "/dev/shm, GPU clocks, the journal's disk and the clock.",
            "Nothing is changed; a new finding is an event.",
        ),
        "/v1/doctor/run",
    )


def parse_seconds(words: str) -> float | None:
    """From "30s", "10m" or "1h30m"; ``None`` for "until unset". Raises ``ValueError`` with a hint.

    Empty text is an error: a value without a limit must be asked for.
    """
    words = words.strip()
    if words.lower().replace("-", " ") == UNTIL_UNSET:
        return None
    if not words:
        raise ValueError(f'say how long: 10m or 1h30m, or "{UNTIL_UNSET}"')
    if _TIME.fullmatch(words):
        total = sum(float(count) * _UNITS_S[unit] for count, unit in _PART.findall(words))
        if total > 0:
            return total
    raise ValueError(f'"{words}" is not a time; write 30s, 10m or 1h30m, or "{UNTIL_UNSET}"')


def frozen_levers(model: NodeModel) -> frozenset[str]:
    found = dig(model.status, "policy.frozen")
    return frozenset(map(str, found)) if isinstance(found, list) else frozenset()


def _current(model: NodeModel, lever: str) -> str:
    for one in items(model.status, "levers"):
        if one.get("lever") == lever:
            return setting_text(model, lever, one.get("current"))
    return "its value"
