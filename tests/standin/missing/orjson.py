"""orjson for tests: what vLLM 0.33's API asks of it, where the installed vLLM came without."""

from __future__ import annotations

import json
from typing import Any

OPT_NON_STR_KEYS = 1
OPT_SERIALIZE_NUMPY = 2


def dumps(content: Any, option: int = 0) -> bytes:
    return json.dumps(content, separators=(",", ":"), default=lambda value: value.tolist()).encode()
