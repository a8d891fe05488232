"""What a stand-in process did, for tests to read: one JSON file a process.

Written to the folder that ``STANDIN_EVIDENCE`` names; nothing without it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_folder = os.environ.get("STANDIN_EVIDENCE")
_known: dict[str, Any] = {
    "pid": os.getpid(),
    "began_at": time.time(),
    "began_with": list(sys.orig_argv),
}


def tell(**facts: Any) -> None:
    """Add facts; later ones of a name take its place."""
    _known.update(facts)
    _write()


def count(**more: int) -> None:
    for name, number in more.items():
        _known[name] = _known.get(name, 0) + number
    _write()


def _write() -> None:
    if _folder is None:
        return
    path = Path(_folder) / f"{os.getpid()}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(_known))
    part.replace(path)


_called: set[CodeType] = set()


def _call(frame: FrameType, event: str, argument: Any) -> None:
    if event == "call":
        _called.add(frame.f_code)


def watch_calls() -> None:
    """Remember every Python function that is called from here on, where ``STANDIN_CALLS`` is set.

    ``tell_calls`` writes them.
    """
    if "STANDIN_CALLS" in os.environ:
        threading.setprofile(_call)
        sys.setprofile(_call)


def tell_calls() -> None:
    """Which functions of vLLM and hisparsed were called, as ``file:qualified.name``."""
    if _called:
        sys.setprofile(None)
        names = {f"{code.co_filename}:{code.co_qualname}" for code in _called.copy()}
        tell(calls=sorted(name for name in names if "/vllm/" in name or "/hisparsed/" in name))
