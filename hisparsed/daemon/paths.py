"""Paths of HTTP requests, whole segments at a time. Pure; which of them are served is not here."""

from __future__ import annotations


def is_below(path: str, root: str) -> bool:
    """Whether ``path`` is ``root`` or goes on below it."""
    return path == root or path.startswith(f"{root}/")
