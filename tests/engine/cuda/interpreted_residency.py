"""The miniature worker with the Triton kernels, interpreted on CPU tensors.

Not collected by name: test_residency.py runs this in a separate process.
"""

from __future__ import annotations

import pytest
from hot_worker import HotWorker, two_hot_groups, without_cuda

from hisparsed.kernels import api, triton_backend


def test_every_row_that_attention_reads_is_right_while_leases_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two rows per request, scratch for what does not fit; a seed of eventful steps."""
    assert triton_backend.INTERPRETED
    without_cuda(monkeypatch)
    two_hot_groups(monkeypatch)
    monkeypatch.setattr(api, "pick", lambda backend, device: "triton")
    worker = HotWorker(seed=10, query_len=2, scratch_blocks=9)
    began, moved = worker.live(steps=8)
    assert (began, moved) == (4, 18)
    counters = sum(state.counters.sum(dim=0) for state in worker.node.bank.states)
    assert counters[3:].tolist() == [207, 15, 0], "loads, spills, none dropped, as by C++"
