"""The share of a scaled node that one policy gets: longest call, hot rows, host memory, geometry.

Checked by arithmetic, so that what vLLM or the policy would refuse is reported before the first
run. Imports no vLLM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from hisparsed.engine.scratch import scratch_block_count
from hisparsed.errors import UserError
from hisparsed.plan.layout import (
    real_layout,
    scaled_seqs,
    simulated_layout,
    step_tokens,
    stock_copies,
)
from hisparsed.policy.bounds import engine_multiplier, problems, vllm_multiplier
from hisparsed.policy.effective import CheckedPolicy, check_policy, parse_policy
from hisparsed.policy.problems import ConfigError
from hisparsed.policy.signals import PoolGeometry
from hisparsed.policy.units import format_bytes
from hisparsed.simulate.policies import PolicyChoice, policy_text_of_part
from hisparsed.simulate.scenario import Scenario


def expected_geometry(
    scenario: Scenario, *, host_budget: int, lease_rows: int, max_model_len: int, copies: int
) -> PoolGeometry:
    """``host_budget`` is bytes of the whole node, ``lease_rows`` those of the largest lease."""
    node, scale = scenario.node, scenario.scale
    layout = simulated_layout(node)
    tokens, host_block, chunk = layout.block_tokens, layout.host_block_bytes, layout.chunk_bytes
    return PoolGeometry(
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


MOST_LEASE_ROWS = 32_704
"""Slots of a hot buffer are numbered in 16 bits."""
_HOST_SPARE_BLOCKS = 3
"""Beside one call: vLLM's null block, a copy-on-write tail, and one that can move."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """``host_budget`` is bytes of the whole node, the others are of the part."""

    max_model_len: int
    lease_rows: int
    """Rows of the largest hot buffer; 0 without HiSparse."""
    host_budget: int
    lent_blocks: int | None = None
    """Host blocks that stock vLLM's offload pool gets; ``None`` where the policy says."""
    policy_text: str | None = None
    """The policy's document with the part's sizes and counts; ``None`` where nothing steers."""


def fitting_sizes(scenario: Scenario, policy: PolicyChoice) -> Sizes:
    """Raises ``UserError`` where one call of the longest context does not fit, or the policy is
    impossible on this node."""
    text = policy_text_of_part(policy, scenario.scale)
    checked = None if text is None else parse_policy(text, "the policy")
    longest = _max_model_len(scenario)
    budget = policy.store.host_budget or scenario.host_budget
    if not policy.hisparse:
        return _standard(scenario, policy, longest, budget)
    rows = _lease_rows(scenario, policy.name, checked, longest)
    layout = real_layout(scenario.node, 1)
    host_block = simulated_layout(scenario.node).host_block_bytes
    needed = layout.pages(longest) + _HOST_SPARE_BLOCKS
    if checked is not None:
        host_budget, lent, given = budget, None, 0
        needed = _with_floors(checked, needed, host_block)
        least = Fraction(needed * host_block) / scenario.scale
    else:
        host_budget, given = stock_sizes(scenario, policy, budget)
        lent = given
        # One more than needed, for what the scale rounds away.
        least = (needed + 1) * layout.host_block_bytes / scenario.scale
        least /= Fraction(policy.hisparse_share)
    if _part(host_budget, scenario, host_block) - given < needed:
        what = f"one call of {longest} tokens"
        raise _host_error(scenario, policy, budget, least, what)
    sizes = Sizes(longest, rows, host_budget, lent, text)
    if checked is not None:
        _check_on_node(scenario, policy, checked, sizes)
    return sizes


def _check_on_node(
    scenario: Scenario, policy: PolicyChoice, checked: CheckedPolicy, sizes: Sizes
) -> None:
    copies, layout = policy.store.copies or 1, simulated_layout(scenario.node)
    most = layout.host_block_bytes // layout.chunk_bytes
    if copies > most:
        raise UserError(
            f"--policy {policy.name}: copies: {copies} of a chunk do not fit a host block of this "
            f"node; need at most {most}"
        )
    geometry = expected_geometry(
        scenario,
        host_budget=sizes.host_budget,
        lease_rows=sizes.lease_rows,
        max_model_len=sizes.max_model_len,
        copies=copies,
    )
    try:
        check_policy(checked.loaded, (), lambda variant: problems(variant, geometry))
    except ConfigError as error:
        raise UserError(f"--policy {policy.name}: {error}") from None


def _standard(scenario: Scenario, policy: PolicyChoice, longest: int, budget: int) -> Sizes:
    """All KV of a call is on the GPU, next to vLLM's null block; any chunk on the host will do."""
    layout = real_layout(scenario.node, 1)
    needed = layout.pages(longest) + 1
    blocks = int(layout.baseline_blocks * scenario.scale)
    if blocks < needed:
        larger = layout.baseline_blocks // needed
        hint = f"use --scale {Fraction(1, larger)} or more, or" if larger else "use"
        raise UserError(
            f"--policy {policy.name}: --scale: {scenario.scale} of this node's GPU memory holds "
            f"{max(0, blocks - 1) * layout.block_tokens} tokens without HiSparse, and one call "
            f"has {longest}; {hint} a smaller --max-model-len"
        )
    if _part(budget, scenario, layout.baseline_block_bytes) < 1:
        least = layout.baseline_block_bytes / scenario.scale
        raise _host_error(scenario, policy, budget, least, "one chunk")
    return Sizes(longest, 0, budget)


def stock_sizes(scenario: Scenario, policy: PolicyChoice, budget: int) -> tuple[int, int]:
    """Host bytes and lent blocks that hold as much as stock vLLM's two pools do.

    Stock pools are apart, padded to pages and hold a copy of the indexer for each GPU; here the
    same number of blocks and chunks is put into one budget.
    """
    copies = policy.store.copies or stock_copies(scenario.node)
    layout, simulated = real_layout(scenario.node, copies), simulated_layout(scenario.node)
    hisparse_bytes = int(budget * policy.hisparse_share)
    blocks = hisparse_bytes // layout.host_block_bytes
    chunks = (budget - hisparse_bytes) // (layout.chunk_bytes * layout.copies)
    lent = math.ceil(chunks / (simulated.host_block_bytes // simulated.chunk_bytes))
    return (blocks + lent) * simulated.host_block_bytes, int(lent * scenario.scale)


def _max_model_len(scenario: Scenario) -> int:
    """As asked for, or the longest call: a longer limit only raises vLLM's floors."""
    tokens, most = scenario.node.engine.block_tokens, scenario.node.model.max_model_len
    longest = -(-(scenario.max_model_len or scenario.longest) // tokens) * tokens
    if longest > most:
        asked = "" if scenario.max_model_len is None else "--max-model-len: "
        raise UserError(
            f"{asked}calls of {longest} tokens are more than the {most} that the model takes; set "
            f"--max-model-len to {most} or less"
        )
    return longest


def _lease_rows(scenario: Scenario, name: str, checked: CheckedPolicy | None, longest: int) -> int:
    """The largest lease: the policy's, or vLLM's own; no more than the scaled node can admit."""
    node = scenario.node
    topk, query = node.model.topk, node.query_len
    wanted = vllm_multiplier(query)
    if checked is not None:
        wanted = max(engine_multiplier(one, query) for one in checked.variants.values())
    least = query * topk
    layout = real_layout(node, 1)
    tokens = layout.block_tokens
    window = layout.pages(min(step_tokens(node, scenario.scale), longest))
    scratch = scratch_block_count(
        query_len=query,
        topk=topk,
        block_tokens=tokens,
        max_num_seqs=scaled_seqs(node, scenario.scale),
    )
    room = int(layout.gpu_blocks * scenario.scale) - scratch - 1
    room -= layout.pages(longest) + layout.hot_groups * (window + 2)
    most = room // layout.hot_groups * tokens
    if most < least:
        raise UserError(
            f"--policy {name}: --scale: {scenario.scale} of this node's GPU memory cannot "
            f"admit one call of {longest} tokens with {least} hot rows; use a larger scale or a "
            "smaller --max-model-len"
        )
    # vLLM takes no less than the worst step, though with scratch a lease may be smaller.
    return max(least, min(math.ceil(wanted * topk), most, MOST_LEASE_ROWS))


def _with_floors(checked: CheckedPolicy, needed: int, block_bytes: int) -> int:
    """Host blocks of both pools where HiSparse needs this many, in every variant of the policy."""
    found = needed
    for variant in checked.variants.values():
        besides, share = 0, 0.0
        for size in (variant.pools.offload.floor, variant.pools.reserve):
            if isinstance(size, float):
                share += size
            else:
                besides += math.ceil(size / block_bytes)
        # The schema leaves room for both; where it does not, the node refuses it.
        found = max(found, math.ceil((needed + besides) / max(0.01, 1 - share)))
    return found


def _part(budget: int, scenario: Scenario, block_bytes: int) -> int:
    """Whole blocks of the scaled budget."""
    return int(budget * scenario.scale) // block_bytes


def _host_error(
    scenario: Scenario, policy: PolicyChoice, budget: int, least: Fraction, what: str
) -> UserError:
    """``least`` is bytes of the whole node."""
    place, who = "--host-budget", f" under {policy.name}"
    if policy.store.host_budget is not None:
        place, who = f"--policy {policy.name}: host.budget", ""
    unit, size = ("GiB", 2**30) if least >= 16 * 2**30 else ("MiB", 2**20)
    return UserError(
        f"{place}: {format_bytes(budget)} at --scale {scenario.scale} cannot hold {what}{who}; "
        f"give at least {math.ceil(least / size)}{unit}"
    )
