"""What a call passes on to connectors: ``extra_args``, which clients fill through ``vllm_xargs``.

vLLM takes text and numbers there under every name, and then reads ``kv_transfer_params`` as an
object. Judges that one kind; what stands inside it is the connector's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TRANSFER = "kv_transfer_params"
_SHOWN = 60


def transfer_fault(extra_args: Mapping[str, Any] | None) -> str | None:
    """Why ``extra_args`` of a call cannot be; ``None`` where they can."""
    given = extra_args.get(TRANSFER) if extra_args else None
    if given is None or isinstance(given, Mapping):
        return None
    shown = repr(given)
    if len(shown) > _SHOWN:
        shown = f"{shown[:_SHOWN]}..."
    return (
        f"vllm_xargs.{TRANSFER}: {shown} is not an object; send an object in {TRANSFER} at the top "
        "of the call, as a prefill node answered it, or leave it out"
    )
