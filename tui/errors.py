"""Errors of the operator's view that a person can put right."""

from __future__ import annotations


class ViewError(Exception):
    """The message names the place, the value and what would be right."""


class Unreachable(ViewError):  # noqa: N818 (a state of the node, not a mistake)
    """The node gave no answer."""


class Refused(ViewError):  # noqa: N818 (an answer)
    """The node answered, and said no. ``code`` is the API's."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
