"""The policy's values on one node: whole host blocks, bounds, limits, and the start.

The offload pool's target is the one number that moves; the HiSparse pool has the rest of
the budget, so its floor is a ceiling here and its ceiling a floor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hisparsed.policy.decisions import EngineCommand, Reason
from hisparsed.policy.reach import equal_reach_blocks
from hisparsed.policy.schema import Mode, Policy
from hisparsed.policy.signals import AdmissionOrder, AdmissionRules, Lever, PoolGeometry

_ROUNDING = 1e-9
_TAIL_BLOCKS = 2
_AUTO_MOST = 2.0
"""``hot.max: auto`` in what vLLM itself reserves: above it misses fall only a little."""
LEAST_AGEING_S = 30.0


@dataclass(frozen=True, slots=True)
class SplitBounds:
    """Lowest and highest offload target, in host blocks, and the bound that each comes from."""

    low_blocks: int
    low_reason: Reason
    low_words: str
    high_blocks: int
    high_reason: Reason
    high_words: str

    def clamp(self, blocks: int) -> int:
        return max(self.low_blocks, min(self.high_blocks, blocks))


@dataclass(frozen=True, slots=True)
class HotBounds:
    """The multiplier in whole hot blocks of one group."""

    min_blocks: int
    max_blocks: int
    step_blocks: int

    def clamp(self, blocks: int) -> int:
        return max(self.min_blocks, min(self.max_blocks, blocks))


def size_in_blocks(geometry: PoolGeometry, size: int | float) -> float:
    """A pool size (``int`` bytes or ``float`` share of the budget) in host blocks, unrounded."""
    if isinstance(size, float):
        return size * geometry.budget_blocks
    return size / geometry.host_block_bytes


def one_request_blocks(geometry: PoolGeometry) -> int:
    """Host blocks without which a request at ``max_model_len`` would wait forever."""
    return -(-geometry.max_model_len // geometry.block_tokens) + _TAIL_BLOCKS


def shared_blocks(policy: Policy, geometry: PoolGeometry) -> int:
    """Host blocks of both pools together: the budget less the reserve."""
    return geometry.budget_blocks - reserve_blocks(policy, geometry)


def reserve_blocks(policy: Policy, geometry: PoolGeometry) -> int:
    """Host blocks that neither pool gets; one request's need has priority."""
    most = max(0, geometry.budget_blocks - one_request_blocks(geometry))
    return min(most, _down(size_in_blocks(geometry, policy.pools.reserve)))


def split_bounds(policy: Policy, geometry: PoolGeometry) -> SplitBounds:
    """Bounds of the offload target; one request's need has priority over every other bound."""
    shared, pools = shared_blocks(policy, geometry), policy.pools
    one_request = one_request_blocks(geometry)
    hisparse_floor = _up(size_in_blocks(geometry, pools.hisparse.floor))
    offload_ceiling = min(shared, _down(size_in_blocks(geometry, pools.offload.ceiling)))
    hisparse_keeps = shared - max(hisparse_floor, one_request)
    high = max(0, min(offload_ceiling, hisparse_keeps))
    offload_floor = _up(size_in_blocks(geometry, pools.offload.floor))
    hisparse_ceiling = min(shared, _down(size_in_blocks(geometry, pools.hisparse.ceiling)))
    low = min(high, max(offload_floor, shared - hisparse_ceiling))
    if offload_floor >= shared - hisparse_ceiling:
        low_reason, low_words = Reason.LIMITED_BY_FLOOR, "the offload pool's floor"
    else:
        low_reason, low_words = Reason.LIMITED_BY_CEILING, "the HiSparse pool's ceiling"
    if offload_ceiling <= hisparse_keeps:
        high_reason, high_words = Reason.LIMITED_BY_CEILING, "the offload pool's ceiling"
    elif hisparse_floor >= one_request:
        high_reason, high_words = Reason.LIMITED_BY_FLOOR, "the HiSparse pool's floor"
    else:
        high_reason, high_words = Reason.LIMITED_BY_FLOOR, "one request at max_model_len"
    return SplitBounds(low, low_reason, low_words, high, high_reason, high_words)


def start_blocks(policy: Policy, geometry: PoolGeometry) -> int:
    """The offload target to begin with: the policy's, else that of an idle node."""
    bounds, pools = split_bounds(policy, geometry), policy.pools
    if pools.offload.start is not None:
        return bounds.clamp(round(size_in_blocks(geometry, pools.offload.start)))
    if pools.hisparse.start is not None:
        hisparse = round(size_in_blocks(geometry, pools.hisparse.start))
        return bounds.clamp(shared_blocks(policy, geometry) - hisparse)
    shared = shared_blocks(policy, geometry)
    need = equal_reach_blocks(geometry, policy.rebalance.margin, 0, 0, shared)
    return bounds.clamp(need + dead_band_blocks(policy, geometry, need))


def dead_band_blocks(policy: Policy, geometry: PoolGeometry, need_blocks: int) -> int:
    """Blocks by which a target may be off without a move; at least one."""
    band = policy.rebalance.dead_band
    return max(
        1,
        _up(size_in_blocks(geometry, band.absolute)),
        _up(band.relative * need_blocks),
    )


def step_blocks(geometry: PoolGeometry, step: float) -> int:
    """The most blocks one move may shift; at least one."""
    return max(1, _down(step * geometry.budget_blocks))


def hot_bounds(policy: Policy, geometry: PoolGeometry) -> HotBounds:
    """The policy's range and step, limited to the sizes that the node can lease."""
    hot, unit = policy.hot, hot_unit(geometry)
    legal = min_lease_blocks(geometry)
    least = min(geometry.max_lease_blocks, max(legal, _up(hot.min / unit)))
    highest = highest_multiplier(policy, geometry.decode_query_len)
    most = min(geometry.max_lease_blocks, _down(highest / unit))
    step = max(1, round(hot.step / unit))
    return HotBounds(least, max(least, most), step)


def hot_unit(geometry: PoolGeometry) -> float:
    """The multiplier that one hot block of a group is worth."""
    return geometry.hot_block_rows / geometry.topk


def vllm_multiplier(decode_query_len: int) -> float:
    """Rows that vLLM itself reserves: the worst step of a request, and one row's selection more."""
    return float(decode_query_len + 1)


def highest_multiplier(policy: Policy, decode_query_len: int) -> float:
    """The policy's highest multiplier on a node of this many decode rows per request."""
    hot = policy.hot
    if isinstance(hot.max, str):
        return max(hot.min, _AUTO_MOST * vllm_multiplier(decode_query_len))
    return hot.max


def engine_multiplier(policy: Policy, decode_query_len: int) -> float:
    """The largest lease that an engine is started for, and begins with.

    A lever that may not act would never lower it, so ``auto`` is then vLLM's own.
    """
    acts = policy.mode_of(Lever.MULTIPLIER) is Mode.ACT
    if acts or not isinstance(policy.hot.max, str):
        return highest_multiplier(policy, decode_query_len)
    return max(policy.hot.min, vllm_multiplier(decode_query_len))


def start_multiplier(policy: Policy, decode_query_len: int) -> float:
    """What the policy begins with on a node of this many decode rows per request, in its range."""
    hot = policy.hot
    first = vllm_multiplier(decode_query_len) if isinstance(hot.start, str) else hot.start
    return min(max(first, hot.min), highest_multiplier(policy, decode_query_len))


def start_lease_blocks(policy: Policy, geometry: PoolGeometry) -> int:
    """Hot blocks of one group that the first leases take."""
    first = start_multiplier(policy, geometry.decode_query_len)
    return hot_bounds(policy, geometry).clamp(lease_blocks(geometry, first))


def min_lease_blocks(geometry: PoolGeometry) -> int:
    """Hot blocks of one group below which a lease is not legal on this node."""
    return -(-geometry.least_lease_rows // geometry.hot_block_rows)


def lease_blocks(geometry: PoolGeometry, multiplier: float) -> int:
    """Hot blocks of one group that a lease at ``multiplier`` takes."""
    return _up(multiplier / hot_unit(geometry))


def start_ageing_s(policy: Policy) -> float:
    """The bound before the first observation."""
    settings = policy.admission
    if not isinstance(settings.ageing, str):
        return settings.ageing
    return min(LEAST_AGEING_S, settings.max_wait)


def admission_for(
    policy: Policy, max_num_seqs: int, order: AdmissionOrder, bound_s: float
) -> AdmissionRules:
    """Order and limits together: new sessions are only limited while coverage is low."""
    settings = policy.admission
    low_coverage = order is AdmissionOrder.HELD_PREFIX_FIRST
    return AdmissionRules(
        order=order,
        ageing_s=bound_s,
        max_running=min(max_num_seqs, settings.max_running or max_num_seqs),
        max_waiting_sessions=settings.max_waiting_sessions if low_coverage else None,
        retry_after_s=settings.retry_after,
        max_wait_s=settings.max_wait,
        when_full=settings.when_full,
        max_context_tokens=settings.max_context,
        over_max_context=settings.over_max_context,
        oldest_share=settings.oldest_share,
    )


def start_admission(policy: Policy, max_num_seqs: int) -> AdmissionRules:
    """What to begin with: the policy's own order, else that of arrival."""
    settings = policy.admission
    order = AdmissionOrder.ARRIVAL if settings.order == "auto" else AdmissionOrder(settings.order)
    return admission_for(policy, max_num_seqs, order, start_ageing_s(policy))


def start_command(policy: Policy, geometry: PoolGeometry) -> EngineCommand:
    """The command before the first tick, for levers that the policy may act on.

    Levers in another mode stay ``None``: the node keeps what its engine started with. So does
    the multiplier where it cannot change live.
    """
    acts = frozenset(lever for lever in Lever if policy.mode_of(lever) is Mode.ACT)
    splits = Lever.SPLIT in acts and geometry.lends
    offload = start_blocks(policy, geometry) if splits else None
    lease = start_lease_blocks(policy, geometry)
    admission = start_admission(policy, geometry.max_num_seqs)
    reserve = reserve_blocks(policy, geometry) if splits else 0
    shared = shared_blocks(policy, geometry)
    return EngineCommand(
        offload_target_blocks=offload,
        hisparse_target_blocks=None if offload is None else shared - offload,
        reserve_target_blocks=reserve or None,
        multiplier=lease * hot_unit(geometry)
        if Lever.MULTIPLIER in acts and geometry.hot_live
        else None,
        watermark=policy.watermark.value if Lever.WATERMARK in acts else None,
        admission=admission if Lever.ADMISSION in acts else None,
    )


def problems(policy: Policy, geometry: PoolGeometry) -> tuple[str, ...]:
    """Reasons why this policy is impossible on this node; empty when there are none.

    Each text names the keys, the values in blocks, and the expected value.
    """
    return (*_pool_problems(policy, geometry), *_gpu_problems(policy, geometry))


def _pool_problems(policy: Policy, geometry: PoolGeometry) -> list[str]:
    found = []
    budget, pools = geometry.budget_blocks, policy.pools
    one_request = one_request_blocks(geometry)
    if one_request > budget:
        found.append(
            f"the host budget is {budget} blocks, but one request at max_model_len needs "
            f"{one_request}; raise the budget or lower max_model_len"
        )
    for name, pool in (("hisparse", pools.hisparse), ("offload", pools.offload)):
        floor, ceiling = (
            _up(size_in_blocks(geometry, pool.floor)),
            _down(size_in_blocks(geometry, pool.ceiling)),
        )
        if floor > ceiling:
            found.append(
                f"pools.{name}.floor is {floor} host blocks and pools.{name}.ceiling "
                f"{ceiling}; the ceiling must be at least the floor"
            )
    offload_floor = _up(size_in_blocks(geometry, pools.offload.floor))
    hisparse_floor = _up(size_in_blocks(geometry, pools.hisparse.floor))
    reserve = _down(size_in_blocks(geometry, pools.reserve))
    least = max(hisparse_floor, one_request)
    if hisparse_floor > budget >= one_request:
        found.append(
            f"pools.hisparse.floor is {hisparse_floor} host blocks, but the budget is {budget}; "
            f"lower it to at most {max(0, budget - offload_floor)} blocks, or raise the budget"
        )
    elif one_request <= budget < offload_floor + least:
        found.append(
            f"pools.offload.floor is {offload_floor} host blocks, but of {budget} the HiSparse "
            f"pool needs {least} (pools.hisparse.floor or one request at max_model_len); "
            f"lower pools.offload.floor to at most {max(0, budget - least)} blocks"
        )
    elif one_request <= budget < offload_floor + least + reserve:
        found.append(
            f"pools.reserve is {reserve} host blocks, but of {budget} the two pools need "
            f"{offload_floor + least} (their floors, or one request at max_model_len); "
            f"lower pools.reserve to at most {budget - least - offload_floor} blocks"
        )
    ceilings = _down(size_in_blocks(geometry, pools.hisparse.ceiling)) + _down(
        size_in_blocks(geometry, pools.offload.ceiling)
    )
    # Two shares lose up to one block to rounding down; schema checks those exactly.
    if ceilings < budget - reserve - 1:
        found.append(
            f"pools.hisparse.ceiling and pools.offload.ceiling are {ceilings} host blocks "
            f"together; they must cover the {'budget' if not reserve else 'budget less reserve'} "
            f"of {budget - reserve}"
        )
    return found


def _gpu_problems(policy: Policy, geometry: PoolGeometry) -> list[str]:
    found = []
    hot, unit = policy.hot, hot_unit(geometry)
    most = geometry.max_lease_blocks * unit
    legal = min_lease_blocks(geometry)
    if hot.min / unit > geometry.max_lease_blocks + _ROUNDING:
        found.append(f"hot.min is {hot.min}, but this node can lease at most {most}x; lower it")
    if not isinstance(hot.max, str) and lease_blocks(geometry, hot.max) < legal:
        found.append(
            f"hot.max is {hot.max:g}, but a step on this node needs {geometry.least_lease_rows} "
            f"hot rows; raise hot.max to at least {legal * unit:g}, or write auto"
        )
    if hot.step > most + _ROUNDING:
        found.append(
            f"hot.step is {hot.step:g}, more than the {most:g}x that this node can lease at all; "
            f"write the change of one move, such as 0.5"
        )
    watermark = policy.watermark.value
    if watermark is not None and watermark > geometry.gpu_blocks_total:
        found.append(
            f"watermark.value is {watermark} blocks, but the GPU pool has "
            f"{geometry.gpu_blocks_total}; pages would leave the GPU however empty it is, so "
            f"write at most {geometry.gpu_blocks_total}, or null for vLLM's own"
        )
    longest = policy.admission.max_context
    if longest is not None and longest > geometry.max_model_len:
        found.append(
            f"admission.max_context is {longest} tokens, but the model ends at "
            f"{geometry.max_model_len}; write less, or null for the model's own limit"
        )
    return found


def _up(blocks: float) -> int:
    return math.ceil(blocks - _ROUNDING)


def _down(blocks: float) -> int:
    return math.floor(blocks + _ROUNDING)
