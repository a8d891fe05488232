"""An answer that the engine cut off is sent as one that ended.

An engine core that is stopped aborts its calls (``FINISHED_ABORTED``). The API's servers make an
error of the finish reason ``error`` alone (``_raise_if_error``), so ``abort`` goes out with status
200, and a stream ends with ``[DONE]``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any
from unittest.mock import MagicMock

from tests.upstream.outcome import run

REASONS = ("error", "abort")


def is_error(reason: str) -> bool:
    """Whether vLLM's base of all servers turns the finish reason into an error."""
    module = import_module("vllm.entrypoints.generate.base.serving")
    serving: Any = next(one for one in vars(module).values() if hasattr(one, "_raise_if_error"))
    try:
        serving._raise_if_error(MagicMock(), reason, "call")
    except Exception:
        return True
    return False


def reproduce() -> str | None:
    error, abort = map(is_error, REASONS)
    assert error
    return None if abort else "The finish reason 'error' raises; 'abort' does not."


if __name__ == "__main__":
    run(reproduce)
