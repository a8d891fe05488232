"""Host blocks of finished calls whose copies are still under way: held since vLLM 0.31.

Before, such blocks were given back at once and their prefix was not published.
"""

from __future__ import annotations

from typing import Any


def detached_blocks(publication: Any) -> list[Any]:
    """What a pending ``publication`` of HiSparse's coordinator holds on its own."""
    if publication is None:
        return []
    return list(getattr(publication, "detached_blocks", None) or ())
