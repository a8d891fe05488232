"""What vLLM takes from NIXL's compiled module: the name of a type."""

from __future__ import annotations

from nixl._api import Telemetry as nixlXferTelemetry

__all__ = ["nixlXferTelemetry"]
