"""How a CUDA node's processes begin, on a platform that leaves vLLM's start method alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from standin_node import CARD_BYTES, CudaNode, cuda_files

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]
WITHOUT_SPAWN = str(Path(__file__).with_name("without_spawn.py"))


def test_the_test_of_the_start_sees_a_node_without_the_line_that_sets_spawn(tmp_path: Path) -> None:
    """vLLM then forks, as it does on CUDA: workers share signals and sockets with the daemon."""
    files = cuda_files(tmp_path / "forked", ranks=1)
    node = CudaNode(files, card_bytes=CARD_BYTES, program=(WITHOUT_SPAWN,))
    try:
        node.wait_until_ready()
        assert node.spawned() == [False]
    finally:
        node.kill()
