"""The policy's own multiplier law on the closed form: reports in, decisions out, no engine.

A ``LiveNode`` counts what a steady node would report, second by second, and takes what ``decide``
commands. Everything but the multiplier is held where it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from hisparsed.config.node import shipped_config
from hisparsed.config.node_description import NodeDescription
from hisparsed.policy.bounds import (
    engine_multiplier,
    highest_multiplier,
    start_blocks,
    start_multiplier,
)
from hisparsed.policy.decide import decide
from hisparsed.policy.effective import load_policy
from hisparsed.policy.memory import Memory
from hisparsed.policy.schema import Policy
from hisparsed.policy.sharing import share_hot_budget
from hisparsed.policy.signals import (
    AdmissionOrder,
    AdmissionRules,
    GpuPool,
    HiSparsePool,
    HotBuffers,
    LeasePoint,
    Lever,
    LiveSet,
    MissPoint,
    OffloadPool,
    Prefix,
    Progress,
    RequestHot,
    Requests,
    Snapshot,
    StepCpu,
    Tokens,
    Watermark,
)
from hisparsed.simulate.scenario import Scenario
from hisparsed.simulate.sizes import expected_geometry
from tests.bench.multiplier_model import ClosedForm, Steady, Traffic

TICK_S = 2.0
_LIVE_S = 720.0
"""Time for the law to come to rest; the calls of the last ``_COUNTED_S`` count."""
_COUNTED_S = 60.0
_CURVE_POINTS = 19
"""Points of the reported miss curve, a half top-k apart from 1x, as the simulated node has."""


@dataclass(slots=True)
class _Counters:
    steps: float = 0.0
    tokens: float = 0.0
    decode_s: float = 0.0
    references: float = 0.0
    resident: float = 0.0
    loads: float = 0.0
    bytes: float = 0.0
    finished: float = 0.0


class LiveNode:
    """Begins at the policy's start."""

    def __init__(self, form: ClosedForm, policy: Policy) -> None:
        node = form.node
        self._form, self._policy = form, policy
        self.multiplier = start_multiplier(policy, node.query_len)
        most = engine_multiplier(policy, node.query_len)
        self._geometry = expected_geometry(
            Scenario(node, (), node.host.budget),
            host_budget=node.host.budget,
            lease_rows=round(most * node.model.topk),
            max_model_len=node.model.max_model_len,
            copies=1,
        )
        self._lent = start_blocks(policy, self._geometry)
        self._memory = Memory()
        self._now_s = 0.0
        self._total = _Counters()
        self._known: dict[tuple[Traffic, float], Steady] = {}
        self.changes: list[tuple[float, float]] = []
        """Second and multiplier of every move."""

    def run(self, traffic: Traffic, seconds: float) -> float:
        """Calls that ``seconds`` of this traffic finish. Raises ``ValueError`` where none fits."""
        until_s, calls = self._now_s + seconds, 0.0
        while self._now_s < until_s:
            steady = self.steady(traffic)
            self._count(steady)
            calls += steady.calls_per_s * TICK_S
            snapshot = self._snapshot(traffic, steady)
            decision, self._memory = decide(self._policy, snapshot, self._memory)
            lever = decision.of(Lever.MULTIPLIER)
            if lever.acts and lever.wanted != self.multiplier:
                self.multiplier = float(lever.wanted)
                self.changes.append((self._now_s, self.multiplier))
        return calls

    def steady(self, traffic: Traffic) -> Steady:
        key = traffic, self.multiplier
        if key not in self._known:
            found = self._form.steady(traffic, self.multiplier)
            if found is None:
                raise ValueError(f"no call of {traffic} fits at {self.multiplier:g}x")
            self._known[key] = found
        return self._known[key]

    def _count(self, steady: Steady) -> None:
        self._now_s += TICK_S
        steps = TICK_S / steady.step_s
        total, groups = self._total, self._geometry.hot_groups
        rows = steps * steady.decoding * groups
        total.steps += steps
        total.tokens += steps * steady.step_tokens
        total.decode_s += steps * (1 - steady.prefill_share) * steady.decode_step_s
        total.references += rows * (steady.from_host_rows + steady.resident_rows)
        total.resident += rows * steady.resident_rows
        total.loads += rows * steady.missed_rows
        total.bytes += steps * steady.loaded_bytes
        total.finished += TICK_S * steady.calls_per_s

    def _snapshot(self, traffic: Traffic, steady: Steady) -> Snapshot:
        total, geometry, form = self._total, self._geometry, self._form
        waiting = traffic.users - steady.running
        capacity = geometry.budget_blocks - self._lent
        chunks = self._lent * geometry.chunks_per_host_block
        in_use = min(capacity, steady.running * form.layout.pages(traffic.context))
        references, resident, loads = (
            int(one) for one in (total.references, total.resident, total.loads)
        )
        busy = steady.core_s / steady.decode_step_s
        return Snapshot(
            at_s=self._now_s,
            tick=int(self._now_s),
            policy_generation=1,
            report_age_s=0.0,
            geometry=geometry,
            hisparse=HiSparsePool(capacity, capacity, in_use, capacity - in_use, 0),
            offload=OffloadPool(chunks, self._lent, self._lent, 0, chunks),
            pending_blocks=0,
            draining_blocks=0,
            head_need_blocks=0,
            gpu=GpuPool(
                form.gpu_blocks,
                steady.free_blocks,
                waiting > 0,
                steady.held_blocks if waiting else None,
            ),
            requests=Requests(
                running=steady.running,
                waiting=waiting,
                preemptions_total=0,
                full=0 if steady.leased else steady.running,
                mixed=0,
                none=steady.running if steady.leased else 0,
                finished_total=int(total.finished),
            ),
            hot=HotBuffers(
                multiplier=self.multiplier,
                references_total=references,
                hits_total=references - resident - loads,
                loads_total=loads,
                resident_total=resident,
                h2d_bytes_total=int(total.bytes),
                predicted=self._curve(steady),
            ),
            sessions=LiveSet(traffic.users * traffic.context, traffic.users),
            prefix=Prefix(0, 0),
            tokens=Tokens(int(total.tokens), 0),
            admission=AdmissionRules(
                AdmissionOrder.ARRIVAL, 30.0, geometry.max_num_seqs, None, 10.0
            ),
            watermark=Watermark(form.gpu_blocks // 10, True),
            progress=Progress(int(total.steps), int(total.tokens), total.decode_s),
            step_cpu=StepCpu(steady.core_s, steady.core_s, min(1.0, busy)),
        )

    def _curve(self, steady: Steady) -> tuple[MissPoint, ...]:
        """As the simulated node reports it: by hot rows, over all that decode."""
        if steady.from_host_rows < 1:
            return ()
        topk, kinds = self._geometry.topk, self._form.localities
        return tuple(
            MissPoint(
                1 + half / 2,
                sum(self._form.misses(steady, (1 + half / 2) * topk, kind) for kind in kinds)
                / len(kinds),
            )
            for half in range(_CURVE_POINTS)
        )


def shipped_policy() -> Policy:
    return load_policy(shipped_config("policy.yaml")).loaded.value


def knowing(policy: Policy, node: NodeDescription) -> Policy:
    """``policy`` as if the node measured for how long steps wait for rows: reads that computing
    hides cost no time, and the bytes that may move are those of the link."""
    exposed = max(1e-6, 1 - node.speed.gather_overlap)
    hot = policy.hot.model_copy(
        update={
            "row_rate": policy.hot.row_rate / exposed,
            "pcie_budget": node.gpu.row_read_bandwidth,
        }
    )
    return policy.model_copy(update={"hot": hot})


def at_rest(form: ClosedForm, policy: Policy, traffic: Traffic) -> float:
    """Calls per hour once the law has come to rest. Raises ``ValueError`` where none fits."""
    node = LiveNode(form, policy)
    node.run(traffic, _LIVE_S - _COUNTED_S)
    return node.run(traffic, _COUNTED_S) / _COUNTED_S * 3600


def shared_gain(form: ClosedForm, policy: Policy, traffic: Traffic, size: float) -> float:
    """Calls with buffers shared by marginal gain, by those with even ones of ``size``."""
    steady = form.steady(traffic, size)
    if steady is None or not steady.leased:
        return 1.0
    unit, topk, groups = form.node.engine.block_tokens, form.layout.topk, form.layout.hot_groups
    lease, floor = round(size * topk / unit), topk // unit
    ceiling = max(lease, round(highest_multiplier(policy, form.node.query_len) * topk / unit))
    points = range(floor, ceiling + 1, floor // 2)
    requests = [
        RequestHot(
            f"{number:02}",
            lease,
            lease,
            tuple(
                LeasePoint(
                    blocks,
                    groups * steady.from_host_rows * form.misses(steady, blocks * unit, kind),
                )
                for blocks in points
            ),
        )
        for number, kind in enumerate(form.localities)
    ]
    shared = share_hot_budget(
        requests,
        lease * len(requests),
        floor_blocks=floor,
        ceiling_blocks=ceiling,
        max_change_blocks=ceiling,
    )
    rows = [blocks * unit for blocks in shared.leases.values()]
    with_shares = form.steady(traffic, size, rows)
    return 1.0 if with_shares is None else with_shares.calls_per_s / steady.calls_per_s
