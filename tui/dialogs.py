"""Dialogs: confirm a change, choose one of a few, type a value, read something long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Footer, Input, Label, OptionList, Static
from textual.widgets.option_list import Option

from hisparsed.tui.changes import ChangeRequest, parse_seconds
from hisparsed.tui.styled import EMPTY, Line, line
from hisparsed.tui.widgets import LinesView, SteadyModal

DIALOG_TEXT = 68
"""Cells of text that a line of a dialog holds."""
_DETAIL_FRAME = 4
"""Rows of a detail dialog in addition to its text: frame, title and an empty one."""
LinesFor = Callable[[int], Sequence[Line]]
"""Lines for a width in cells."""


class ConfirmDialog(SteadyModal[bool]):
    """The consequences of a change, and yes or no; the cursor is on no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape", "answer(False)", "No"),
        Binding("left,right", "other", "Other", show=False),
    ]

    def __init__(self, change: ChangeRequest) -> None:
        super().__init__()
        self.change = change

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Label(f"{self.change.title}?", classes="dialog-title", markup=False)
            for sentence in self.change.consequences:
                yield Static(sentence, classes="dialog-text", markup=False)
            with Horizontal(classes="dialog-buttons"):
                yield Button("No", id="no", compact=True)
                yield Button("Yes", id="yes", variant="warning", compact=True)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one("#no", Button).focus()

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)

    def action_other(self) -> None:
        self.focus_next()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")


class ChoiceDialog(SteadyModal[str | None]):
    """One of ``choices``, or ``None`` when closed."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Leave")]

    def __init__(self, title: str, choices: Sequence[str]) -> None:
        super().__init__()
        self._title = title
        self._choices = list(choices)

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Label(self._title, classes="dialog-title", markup=False)
            yield OptionList(*(Option(one) for one in self._choices), markup=False)
        yield Footer(show_command_palette=False)

    def action_leave(self) -> None:
        self.dismiss(None)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._choices[event.option_index])


class ValueDialog(SteadyModal[tuple[str, float | None] | None]):
    """A new value for a policy key, and for how long in seconds; ``about`` describes the allowed
    values."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Leave")]

    def __init__(self, key: str, value: str, about: Sequence[Line] = ()) -> None:
        super().__init__()
        self._key = key
        self._value = value
        self._about = about

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Label(f"Set {self._key}, now {self._value}", classes="dialog-title", markup=False)
            words = "\n".join(one.plain for one in self._about)
            yield Static(words, classes="dialog-text", markup=False)
            yield Input(placeholder="value, as the policy file would have it", id="value")
            yield Input(placeholder="for how long: 10m, 1h30m, or: until unset", id="for")
            yield Label("", id="mistake", markup=False)
            yield Static(
                "Enter goes to the next field, then asks before anything changes.",
                classes="hint",
                markup=False,
            )
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one("#value", Input).focus()

    def action_leave(self) -> None:
        self.dismiss(None)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        value, words = self.query_one("#value", Input), self.query_one("#for", Input)
        if event.input is value:
            words.focus()
            return
        if not value.value.strip():
            self._say("a value is needed")
            value.focus()
            return
        try:
            seconds = parse_seconds(words.value)
        except ValueError as error:
            self._say(str(error))
            return
        self.dismiss((value.value.strip(), seconds))

    def _say(self, mistake: str) -> None:
        self.query_one("#mistake", Label).update(mistake)


class DetailDialog(SteadyModal[None]):
    """Text to read: as tall as its lines, at most as tall as the screen allows."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "leave", "Back"),
        Binding("k", "scroll(-1)", "Up", show=False),
        Binding("j", "scroll(1)", "Down", show=False),
    ]

    def __init__(self, title: str, lines: LinesFor, note: str = "") -> None:
        super().__init__()
        self._title = title
        self._lines = lines
        self._note = note

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog detail"):
            yield Label(self._title, classes="dialog-title", markup=False)
            yield LinesView(id="detail")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one("#detail").focus()
        self.call_after_refresh(self._show)

    def resized(self, event: events.Resize) -> None:
        self.call_after_refresh(self._show)

    def _show(self) -> None:
        view = self.query_one("#detail", LinesView)
        lines = list(self._lines(max(20, view.size.width - 2)))
        if self._note:
            lines = [line((self._note, "warn")), EMPTY, *lines]
        view.styles.height = max(1, min(len(lines), self.size.height * 92 // 100 - _DETAIL_FRAME))
        view.show_lines(lines)

    def action_leave(self) -> None:
        self.dismiss(None)

    def action_scroll(self, by: int) -> None:
        self.query_one("#detail", LinesView).scroll_relative(y=by, animate=False)
