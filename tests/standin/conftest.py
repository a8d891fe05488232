"""One CUDA node on stand-in cards for the whole folder; `make standin` runs it alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("standin", "node", "engine")]

if TYPE_CHECKING:
    from standin_node import CudaNode


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CudaNode]:
    """Two ranks on small cards, shared: leave it as it was found."""
    from standin_node import CARD_BYTES, CudaNode, cuda_files

    served = CudaNode(cuda_files(tmp_path_factory.mktemp("cuda")), card_bytes=CARD_BYTES)
    try:
        served.wait_until_ready()
        yield served
        assert served.end() == 0, served.log_end()
        served.assert_nothing_left()
        served.keep_evidence()
        assert not served.leftovers(), "shared memory is left behind"
    finally:
        served.kill()
