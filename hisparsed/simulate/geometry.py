"""The sizes that a policy's engine will report, by arithmetic and before it starts.

So a policy that is impossible on the node is refused before the first run. Imports no vLLM.
"""

from __future__ import annotations

from hisparsed.plan.layout import simulated_layout
from hisparsed.plan.scaled import scaled_seqs, step_tokens
from hisparsed.policy.signals import Geometry
from hisparsed.simulate.scenario import Scenario


def expected_geometry(
    scenario: Scenario, *, host_budget: int, lease_rows: int, max_model_len: int, copies: int
) -> Geometry:
    """``host_budget`` is bytes of the whole node, ``lease_rows`` those of the largest lease."""
    node, scale = scenario.node, scenario.scale
    layout = simulated_layout(node)
    tokens, host_block, chunk = layout.block_tokens, layout.host_block_bytes, layout.chunk_bytes
    return Geometry(
        block_tokens=tokens,
        host_block_bytes=host_block,
        offload_chunk_tokens=tokens,
        offload_chunk_bytes=chunk,
        offload_copies=copies,
        chunks_per_host_block=host_block // (chunk * copies),
        # vLLM keeps one block as its null block.
        budget_blocks=int(host_budget * scale) // host_block - 1,
        max_model_len=max_model_len,
        topk=layout.topk,
        decode_query_len=node.query_len,
        gpu_blocks_total=int(layout.gpu_blocks * scale),
        hot_block_rows=tokens,
        hot_groups=layout.hot_groups,
        max_lease_blocks=layout.pages(lease_rows),
        max_num_seqs=scaled_seqs(node, scale),
        row_bytes=host_block // tokens // layout.hot_groups,
        min_lease_rows=layout.topk,
        max_step_tokens=step_tokens(node, scale),
    )
