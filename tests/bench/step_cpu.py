"""CPU time of the engine core's steps: ``python -m tests.bench.step_cpu [--grow WHAT] [--json]``.

Three nodes in one process step in turn through the same calls at the size of eight H200 and all
cache groups: vLLM's untouched classes; hisparsed's with vLLM's bookkeeping of pages; hisparsed's.
Thread CPU milliseconds of ``schedule()`` and ``update_from_output()``, without the model, while
prompts are computed and while there is only decoding. Ratios hold between machines, milliseconds do
not. The nodes are simulated: no byte moves, every decision is made.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

NODE = "8xh200-glm-5.3"
OFFLOAD_SHARE = 0.25
KINDS = ("vllm", "bookkeeping: vllm", "hisparsed")


@dataclass(frozen=True)
class Load:
    """``users`` sessions, each of one call at a time that continues the one before."""

    users: int = 96
    first_tokens: tuple[int, int] = (20_000, 90_000)
    more_tokens: tuple[int, int] = (300, 2_500)
    answer_tokens: tuple[int, int] = (100, 400)
    seed: int = 3
    max_model_len: int = 131_072
    index_every: int = 4
    """Layers that share an indexer: the fewer, the more cache groups."""


@dataclass(frozen=True)
class StepTimes:
    """Thread CPU milliseconds of the steps of one phase."""

    steps: int
    running: float
    mean_ms: float
    p50_ms: float
    p99_ms: float


class Session:
    def __init__(self, number: int, rng: random.Random, load: Load, block_tokens: int) -> None:
        self.number, self._rng, self._load = number, rng, load
        self._block_tokens = block_tokens
        self.turn = 0
        self._begin()

    def _begin(self) -> None:
        self._tokens = self._rng.randrange(*self._load.first_tokens)
        self._names = [
            self._rng.randbytes(16) for _ in range(self._load.max_model_len // self._block_tokens)
        ]

    def call(self) -> Any:
        from hisparsed.engine.simulated.node import SimulatedCall

        answer = self._rng.randrange(*self._load.answer_tokens)
        if self._tokens + answer > self._load.max_model_len:
            self._begin()
        tokens, self.turn = self._tokens, self.turn + 1
        self._tokens += answer + self._rng.randrange(*self._load.more_tokens)
        blocks = tuple(self._names[: (tokens + answer) // self._block_tokens])
        return SimulatedCall(f"{self.number}.{self.turn}", blocks, tokens, answer)


class Timed:
    """One node that plays a load, its scheduler's two calls timed."""

    def __init__(self, kind: str, load: Load, folder: Path) -> None:
        self.kind = kind
        self.node = _started(kind, load, folder)
        self.schedule_s: list[float] = []
        self.update_s: list[float] = []
        self.work: list[tuple[int, int]] = []
        """Tokens and requests of each step."""
        scheduler: Any = self.node._scheduler
        scheduler.schedule = self._timed(scheduler.schedule, self.schedule_s, self._scheduled)
        scheduler.update_from_output = self._timed(scheduler.update_from_output, self.update_s)
        rng = random.Random(load.seed)
        block_tokens = self.node._block_tokens
        self._sessions = [Session(n, rng, load, block_tokens) for n in range(load.users)]
        for session in self._sessions:
            self.node.add(session.call())

    def _timed(
        self,
        call: Callable[..., Any],
        times_s: list[float],
        look: Callable[[Any], None] = lambda _output: None,
    ) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.thread_time()
            output = call(*args, **kwargs)
            times_s.append(time.thread_time() - began_s)
            look(output)
            return output

        return timed

    def _scheduled(self, output: Any) -> None:
        self.work.append((output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)))

    def step(self) -> None:
        emitted, executed = self.node.step()
        for one in emitted:
            if one.finished:
                number = int(one.request_id.partition(".")[0])
                self.node.add(self._sessions[number].call())
        if not executed:
            now_s = self.node.clock.now_s()
            self.node.clock.advance_to(self.node.next_copy_done_s() or now_s + 0.05)

    def phases(self, query_len: int) -> Iterator[tuple[str, list[int]]]:
        """Numbers of the steps that compute prompts, and of those that only decode."""
        prompts = [
            n for n, (tokens, calls) in enumerate(self.work) if tokens > 4 * calls * query_len
        ]
        decodes = [
            n for n, (tokens, calls) in enumerate(self.work) if 0 < tokens <= calls * query_len
        ]
        yield "prompts", prompts
        yield "decoding", decodes


def _started(kind: str, load: Load, folder: Path) -> Any:
    from hisparsed.config.node_description import load_node_description
    from hisparsed.engine.simulated import vllm_config
    from hisparsed.engine.simulated.node import SimulatedNode
    from hisparsed.policy.decisions import EngineCommand

    found = load_node_description(NODE)
    model = found.model.model_copy(update={"index_every": load.index_every})
    described = found.model_copy(update={"model": model})
    options = vllm_config.SimulatedOptions(
        node=described,
        model_folder=folder / kind.replace(": ", "-"),
        host_budget_bytes=int(described.host.budget),
        max_lease_rows=(described.query_len + 1) * described.model.topk,
        max_model_len=load.max_model_len,
        scale=Fraction(1),
        scratch=False,
    )
    if kind == "vllm":
        return _untouched(options)
    own = "vllm" if kind == "bookkeeping: vllm" else "hisparsed"
    node = SimulatedNode(replace(options, bookkeeping=own))
    budget = node.take_report().geometry.budget_blocks
    node.put(EngineCommand(offload_target_blocks=int(budget * OFFLOAD_SHARE)))
    return node


def _untouched(options: Any) -> Any:
    """vLLM's scheduler, managers and offloading; its pools have their own memory."""
    from hisparsed.engine.simulated import node as simulated
    from hisparsed.engine.simulated import vllm_config

    def transfer_config(options: vllm_config.SimulatedOptions) -> Any:
        config = own_transfer_config(options)
        hisparse, offloading = config.kv_connector_extra_config["connectors"]
        host_bytes = int(options.host_budget_bytes * options.scale)
        pool_gib = host_bytes * (1 - OFFLOAD_SHARE) / 2**30
        hisparse["kv_connector_extra_config"]["host_pool_gib"] = pool_gib
        offloading["kv_connector_extra_config"] |= {
            "spec_name": "StandardOffloadingSpec",
            "cpu_bytes_to_use": int(host_bytes * OFFLOAD_SHARE),
        }
        return config

    own_scheduler, own_transfer_config = (
        vllm_config.SCHEDULER,
        vllm_config._hisparse_transfer_config,
    )
    vllm_config.SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
    vllm_config._hisparse_transfer_config = transfer_config
    try:
        node: Any = simulated.SimulatedNode(options)
    finally:
        vllm_config.SCHEDULER = own_scheduler
        vllm_config._hisparse_transfer_config = own_transfer_config
    # Ours counts pages that are only on the host; the simulated GPU asks how many there are.
    resident = node._executor._work._residency._resident

    def share(request_id: str) -> float:
        row = resident.get_residency_row(request_id)
        return 1.0 - float(sum(block.is_null for block in row)) / max(1, len(row))

    node._executor._work._residency.resident_share = share
    return node


def _figures(times_s: Sequence[float], numbers: Sequence[int], work: Sequence[Any]) -> StepTimes:
    ordered = sorted(times_s[n] * 1e3 for n in numbers)
    return StepTimes(
        len(ordered),
        round(sum(work[n][1] for n in numbers) / len(ordered), 1),
        round(sum(ordered) / len(ordered), 2),
        round(ordered[len(ordered) // 2], 2),
        round(ordered[len(ordered) * 99 // 100], 2),
    )


def core_figures(times_s: Sequence[float], work: Sequence[tuple[int, int]]) -> dict[str, float]:
    """``core`` of a node description, by least squares over all steps: of each step, of each
    request in it, of each token. Terms that would be below zero are dropped, and the rest is fitted
    again."""
    of_step = [(cost_s, *one) for cost_s, one in zip(times_s, work, strict=False) if one[0]]
    costs_s = np.array([one[0] for one in of_step])
    by_name = {
        "step_ms": np.full(len(of_step), 1e-3),
        "request_ms": np.array([one[2] for one in of_step]) * 1e-3,
        "token_us": np.array([one[1] for one in of_step]) * 1e-6,
    }
    fitted: dict[str, float] = {}
    left = list(by_name)
    while left:
        columns = np.stack([by_name[name] for name in left], axis=1)
        found = np.linalg.lstsq(columns, costs_s, rcond=None)[0]
        fitted = dict(zip(left, found.tolist(), strict=True))
        if min(fitted.values()) >= 0:
            break
        left.remove(min(left, key=lambda name: fitted[name]))
    return {name: round(fitted.get(name, 0.0), 3) for name in by_name}


def measure(load: Load, steps: int, kinds: Sequence[str] = KINDS) -> dict[str, Any]:
    """``phases``: times by phase, call and kind of bookkeeping. ``core``: ``core_figures`` by kind.

    Nodes take turns, so that a slow moment hits all.
    """
    phases: dict[str, Any] = {}
    core: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="hisparsed-bench-") as folder:
        nodes = [Timed(kind, load, Path(folder)) for kind in kinds]
        gc.collect()
        gc.freeze()
        # Its passes go over all three nodes' objects and slow the one that runs then.
        gc.disable()
        for _ in range(steps):
            for one in nodes:
                one.step()
        for one in nodes:
            both = [a + b for a, b in zip(one.schedule_s, one.update_s, strict=False)]
            core[one.kind] = core_figures(both, one.work)
            query_len = one.node._executor._node.query_len
            for phase, numbers in one.phases(query_len):
                if not numbers:
                    continue
                for call, times_s in (
                    ("schedule", one.schedule_s),
                    ("update_from_output", one.update_s),
                    ("both", both),
                ):
                    figures = _figures(times_s, numbers, one.work)
                    phases.setdefault(phase, {}).setdefault(call, {})[one.kind] = asdict(figures)
            one.node.shutdown()
        gc.enable()
        gc.unfreeze()
    return {"phases": phases, "core": core}


def in_words(found: dict[str, Any]) -> str:
    lines = [f"{'':42}{'steps':>6}{'mean ms':>9}{'p50':>8}{'p99':>9}{'of vLLM':>9}{'p99 of':>8}"]
    for phase, calls in found["phases"].items():
        for call, kinds in calls.items():
            base = kinds.get("vllm")
            for kind, one in kinds.items():
                ratios = ""
                if base is not None:
                    ratios = (
                        f"{one['mean_ms'] / base['mean_ms']:>9.2f}"
                        f"{one['p99_ms'] / base['p99_ms']:>8.2f}"
                    )
                lines.append(
                    f"{phase + ', ' + call + ', ' + kind:42}{one['steps']:>6}{one['mean_ms']:>9.2f}"
                    f"{one['p50_ms']:>8.2f}{one['p99_ms']:>9.2f}{ratios}"
                )
    lines += [f"core of {kind}: {figures}" for kind, figures in found["core"].items()]
    return "\n".join(lines)


GROWTH: dict[str, tuple[Load, ...]] = {
    "requests": tuple(
        Load(users=users, first_tokens=(9_000, 15_000), more_tokens=(50, 100))
        for users in (16, 32, 64, 128, 256)
    ),
    "context": tuple(
        Load(
            users=max(2, 1_000_000 // context),
            first_tokens=(context * 3 // 4, context * 9 // 10),
            max_model_len=context,
        )
        for context in (16_384, 65_536, 262_144, 1_048_576)
    ),
    "groups": tuple(Load(users=48, index_every=every) for every in (16, 8, 4, 2)),
}
"""What grows, one at a time, within the tokens that the node can hold."""


def growth_in_words(what: str, steps: int) -> str:
    lines = [f"{what:34}{'phase':>10}{'running':>9}{'vLLM ms':>9}{'ours ms':>9}{'of vLLM':>9}"]
    for load in GROWTH[what]:
        found = measure(load, steps, ("vllm", "hisparsed"))["phases"]
        told = f"{load.users} users, {load.max_model_len:,}, every {load.index_every}"
        for phase, calls in found.items():
            base, own = calls["both"]["vllm"], calls["both"]["hisparsed"]
            lines.append(
                f"{told:34}{phase:>10}{own['running']:>9.1f}{base['mean_ms']:>9.2f}"
                f"{own['mean_ms']:>9.2f}{own['mean_ms'] / base['mean_ms']:>9.2f}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.step_cpu", description=__doc__)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--users", type=int, default=Load.users)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--grow", choices=GROWTH, help="how times grow, instead")
    arguments = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HISPARSED_ENGINE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if arguments.grow:
        print(growth_in_words(arguments.grow, arguments.steps))  # noqa: T201
        return
    found = measure(replace(Load(), users=arguments.users), arguments.steps)
    print(json.dumps(found) if arguments.json else in_words(found))  # noqa: T201
    sys.stdout.flush()


if __name__ == "__main__":
    main()
