"""Our resolver and vLLM's own operator on the same steps: attention reads the same bytes.

The two evict in different orders, so slots and loads differ; what is read may not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from time_against_vllm import VllmCall, vllm_op

from hisparsed.kernels.api import Resolution, gather, raise_errors
from tests.bench import kernels_gpu
from tests.bench.kernels_work import Case, make_inputs, miss_ratio

DEVICE = torch.device("cuda")


@pytest.fixture(scope="module")
def op() -> Any:
    try:
        return vllm_op()
    except SystemExit as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize(
    "case",
    [
        Case(k=2048, capacity=4096, q=1, requests=3),
        Case(k=2048, capacity=10240, q=4, requests=2),
    ],
    ids=str,
)
def test_attention_reads_the_same_bytes(op: Any, case: Case, record_property: Any) -> None:
    inputs = kernels_gpu.on_device(make_inputs(case, steps=12, seed=2), DEVICE)
    theirs = VllmCall(op, case, inputs)
    theirs.host.random_(generator=torch.Generator().manual_seed(1))
    state = kernels_gpu.fresh_state(case, DEVICE)
    _, slab, layout = kernels_gpu.memories(inputs, DEVICE)
    out = Resolution.create(*inputs.steps[0].shape, device=DEVICE)
    host = theirs.host.view(-1)
    for topk in inputs.steps:
        theirs(topk)
        torch.ops._C_cache_ops.hisparse_gather_compact(
            theirs.host, theirs.slab, theirs.swap_host, theirs.swap_device, theirs.counts
        )
        kernels_gpu.step(state, inputs, topk, out)
        gather(host, slab, layout, out.swap_host, out.swap_physical, out.swap_counts)
        assert torch.equal(theirs.valid, out.valid_counts)
        known = theirs.hot_rows >= 0
        assert torch.equal(known, out.physical_rows >= 0)
        read_theirs = theirs.slab.view(-1, kernels_gpu.ROW_BYTES)[theirs.hot_rows[known].long()]
        read_ours = slab.view(-1, kernels_gpu.ROW_BYTES)[out.physical_rows[known]]
        assert torch.equal(read_theirs, read_ours)
        assert int(read_ours.any(dim=1).sum()) == read_ours.shape[0], "no row is empty"
    raise_errors(DEVICE)
    hits, misses = theirs.stats.view(torch.int64).tolist()
    record_property(f"{case}_miss_ratio", round(miss_ratio(state), 4))
    record_property(f"{case}_vllm_miss_ratio", round(misses / max(1, hits + misses), 4))
