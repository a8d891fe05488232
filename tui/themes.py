"""The look of each role: dark, light, safe for the colour-blind, and without any colour.

Colour is never the only sign: every state also has its own word, letter or character.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.style import Style
from textual.theme import BUILTIN_THEMES, Theme

ROLES = (
    "", "dim", "title", "strong", "good", "warn", "bad", "accent", "alert", "badge", "tab",
    "frame", "chart", "free", "hisparse", "offload", "resident", "hot", "indexer", "cursor",
    "stale",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Look:
    """A Textual theme, and a style for every role."""

    theme: Theme
    styles: dict[str, Style]

    def style(self, role: str) -> Style:
        return self.styles.get(role, Style.null())


def _look(
    name: str,
    *,
    dark: bool,
    background: str,
    surface: str,
    text: str,
    dim: str,
    frame: str,
    title: str,
    good: str,
    warn: str,
    bad: str,
    accent: str,
    chart: str,
    hisparse: str,
    offload: str,
    hot: str,
) -> Look:
    theme = Theme(
        name=name,
        primary=title,
        secondary=accent,
        accent=accent,
        warning=warn,
        error=bad,
        success=good,
        foreground=text,
        background=background,
        surface=surface,
        panel=surface,
        dark=dark,
        variables={"footer-key-foreground": title, "block-cursor-text-style": "none"},
    )
    colours = {
        "dim": dim, "title": f"bold {title}", "strong": f"bold {text}", "good": good,
        "warn": f"bold {warn}", "bad": f"bold {bad}", "accent": accent,
        "alert": f"bold {background} on {warn}", "badge": f"bold {background} on {accent}",
        "tab": f"bold {background} on {title}", "frame": frame, "chart": chart, "free": frame,
        "hisparse": hisparse, "offload": offload, "resident": hisparse, "hot": hot,
        "indexer": offload, "cursor": f"{text} on {surface}", "stale": frame,
    }  # fmt: skip
    return Look(theme, {role: Style.parse(style) for role, style in colours.items()})


DARK = _look(
    "dark", dark=True, background="#11151a", surface="#2b3642", text="#d5dce4", dim="#8593a1",
    frame="#4a5865", title="#7fb7e6", good="#7fc98a", warn="#e5b567", bad="#f07178",
    accent="#b9a2ee", chart="#5fb3b3", hisparse="#6ab0f3", offload="#e5a35c", hot="#c3a6ff",
)  # fmt: skip
LIGHT = _look(
    "light", dark=False, background="#fbfbf9", surface="#dfe5ea", text="#1d2429", dim="#5c6872",
    frame="#a9b3bb", title="#0b5cad", good="#1a7f37", warn="#8a5a00", bad="#b3261e",
    accent="#6a3fb5", chart="#0f7b7b", hisparse="#0b66c3", offload="#a85500", hot="#7a3fc0",
)  # fmt: skip
# Blue, orange, sky and vermilion of a palette made for all common colour deficiencies; good and
# bad are distinguished by lightness too.
COLOUR_BLIND = _look(
    "colour-blind", dark=True, background="#101214", surface="#2d3338", text="#e6e6e6",
    dim="#9aa0a6", frame="#555c63", title="#56b4e9", good="#56b4e9", warn="#f0e442",
    bad="#ff8c42", accent="#cc79a7", chart="#56b4e9", hisparse="#4f9fe0", offload="#e69f00",
    hot="#f0e442",
)  # fmt: skip
_MONO_STYLES = {
    "dim": "dim", "title": "bold", "strong": "bold", "warn": "bold", "bad": "bold underline",
    "accent": "underline", "alert": "bold reverse", "badge": "reverse", "tab": "bold reverse",
    "frame": "dim", "free": "dim", "cursor": "reverse", "stale": "dim",
}  # fmt: skip
_MONO_COLOURS = ("primary", "secondary", "warning", "error", "success", "accent")
MONO = Look(
    replace(
        BUILTIN_THEMES["ansi-dark"],
        name="mono",
        **dict.fromkeys(_MONO_COLOURS, "ansi_default"),  # type: ignore[arg-type]
    ),
    {role: Style.parse(style) for role, style in _MONO_STYLES.items()},
)

LOOKS = {look.theme.name: look for look in (DARK, LIGHT, COLOUR_BLIND, MONO)}
"""By name; ``mono`` is what ``NO_COLOR`` chooses."""
