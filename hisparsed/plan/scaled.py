"""Sizes of a part of a node, as the simulated node runs it. Arithmetic only."""

from __future__ import annotations

import math
from fractions import Fraction

from hisparsed.config.node_description import NodeDescription


def scaled_seqs(node: NodeDescription, scale: Fraction) -> int:
    """Requests that the part may run at once."""
    return max(1, math.ceil(node.engine.max_num_seqs * scale))


def step_tokens(node: NodeDescription, scale: Fraction) -> int:
    """Tokens of one step of the part; room for a step of every request at least."""
    least = max(2 * node.engine.block_tokens, scaled_seqs(node, scale) * node.query_len)
    return max(least, math.ceil(node.engine.max_num_batched_tokens * scale))
