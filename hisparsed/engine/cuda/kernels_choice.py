"""What vLLM is told where our kernels serve the hot buffers of a CUDA node. Imports nothing.

With which vLLM they can is in ``compat.features``.
"""

from __future__ import annotations

from typing import Final

WORKER_EXTENSION: Final = "hisparsed.engine.cuda.residency.extension.HotExtension"
CONNECTOR_MODULE: Final = "hisparsed.engine.cuda.hisparse_connector"
