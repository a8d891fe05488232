"""Server-sent events out of lines of text. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class EventParser:
    """Feed it lines without their ends; an empty line completes an event."""

    _kind: str = "message"
    _data: list[str] = field(default_factory=list)

    def feed(self, line: str) -> tuple[str, str] | None:
        """``(kind, data)`` when this line completes an event that has data."""
        if line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "event":
                self._kind = value
            elif name == "data":
                self._data.append(value)
            return None
        done = (self._kind, "\n".join(self._data)) if self._data else None
        self._kind, self._data = "message", []
        return done
