"""One engine, the same calls: twice with room, from the host, and while levers move.

Greedy tokens and their log probabilities must be equal, bit for bit. Each round sends the same
prompts at the same time, so every step has the same shape; a round whose steps have other shapes
proves nothing and fails as such. So does an engine that with room answers differently each time:
kernels may add up in another order. Prefixes are kept apart by a salt.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpu_suite import Figures

from hisparsed.engine.plugin import control

_BLOCKS_A_CALL = 32
"""GPU blocks that a call may need in one step and the next, over all cache groups."""


@dataclass(frozen=True)
class Calls:
    """``count`` calls at once, of random text of ``prompt`` tokens, answered with ``answer``."""

    count: int = 4
    prompt: int = 3000
    answer: int = 96
    vocabulary: tuple[int, int] = (32, 127)
    log_probabilities: bool = True


@dataclass
class Round:
    """What was answered; ``shapes``: tokens of each engine step."""

    tokens: list[list[int]]
    log_probabilities: list[list[float]]
    shapes: list[int]
    residency: set[str]
    moves_ms: list[float] = field(default_factory=list)


def compare(engine: Any, calls: Calls, *, seed: int = 0) -> Figures:
    """Figures of rounds that agree. Raises ``AssertionError`` where they do not."""
    core = engine.engine_core.engine_core
    geometry = _report(core)["geometry"]
    _apply(core, {"offload_target_blocks": geometry["budget_blocks"] // 10})
    ample = play(engine, calls, "ample")
    again = play(engine, calls, "again")
    try:
        _require_equal(ample, again, "with room once more")
    except AssertionError as error:
        raise AssertionError(f"{error}; so no other round can prove anything here") from None
    with Squeeze(core, calls) as squeeze:
        pressed = play(engine, calls, "pressed", squeeze.tight)
    with Squeeze(core, calls) as squeeze:
        mover = Mover(core, geometry, random.Random(seed), squeeze)
        moved = play(engine, calls, "moved", mover)
    moved.moves_ms = mover.took_ms
    for name, other in (("from the host", pressed), ("while levers moved", moved)):
        _require_equal(ample, other, name)
    if pressed.residency <= {"full"}:
        raise AssertionError("no request left the GPU, so nothing was read from the host")
    hot = _report(core)["hot"]
    return {
        "tokens_equal": sum(map(len, ample.tokens)),
        "distinct_tokens": len({token for answer in ample.tokens for token in answer}),
        "steps": len(ample.shapes),
        "residency_pressed": sorted(pressed.residency),
        "residency_moved": sorted(moved.residency),
        "moves": len(moved.moves_ms),
        "move_ms_median": round(statistics.median(moved.moves_ms), 3),
        "move_ms_most": round(max(moved.moves_ms), 3),
        "hot_live": geometry["hot_live"],
        "rows_loaded": hot["loads_total"] if hot["counted"] else None,
    }


class Squeeze:
    """Takes GPU blocks away once every call has its hot buffer, so that pages lose their place.

    Until then all of them are free: prompts are computed as with room. Gives all back at the end.
    """

    def __init__(self, core: Any, calls: Calls) -> None:
        self._core, self._calls = core, calls
        self._pool = core.scheduler.kv_cache_manager.block_pool
        self._taken: list[Any] = []

    def __enter__(self) -> Squeeze:
        _apply(
            self._core,
            {"watermark": _report(self._core)["geometry"]["gpu_blocks_total"]},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()
        _apply(self._core, {"watermark": "default"})

    def tight(self, step: int) -> None:
        """Leave what the calls need to go on."""
        self.leave(_BLOCKS_A_CALL * self._calls.count)

    def leave(self, free: int) -> None:
        """Leave so many blocks free, more or fewer than before."""
        if _report(self._core)["hot"]["leased_requests"] < self._calls.count:
            return
        self._give_back()
        surplus = self._pool.get_num_free_blocks() - free
        if surplus > 0:
            self._taken = self._pool.get_new_blocks(surplus)

    def _give_back(self) -> None:
        self._pool.free_blocks(reversed(self._taken))
        self._taken = []


class Mover:
    """Moves levers at random, every few steps, and times each command."""

    def __init__(
        self, core: Any, geometry: dict[str, Any], rng: random.Random, squeeze: Squeeze
    ) -> None:
        self._core, self._geometry, self._rng, self._squeeze = core, geometry, rng, squeeze
        self.took_ms: list[float] = []

    def __call__(self, step: int) -> None:
        if step % 4:
            return
        self._squeeze.leave(
            self._rng.randrange(100, max(101, self._geometry["gpu_blocks_total"] // 4))
        )
        command = self._command()
        began_s = time.perf_counter()
        _apply(self._core, command)
        self.took_ms.append((time.perf_counter() - began_s) * 1e3)

    def _command(self) -> dict[str, Any]:
        geometry, rng = self._geometry, self._rng
        floor = _report(self._core)["hisparse"]["floor_blocks"]
        most = geometry["budget_blocks"] - 4 * floor
        command: dict[str, Any] = {"offload_target_blocks": rng.randrange(max(1, most))}
        if geometry["hot_live"]:
            least = -(-geometry["min_lease_rows"] // geometry["block_tokens"])
            blocks = rng.randint(least, geometry["max_lease_blocks"])
            command["multiplier"] = blocks * geometry["block_tokens"] / geometry["topk"]
        return command


def play(
    engine: Any, calls: Calls, salt: str, between_steps: Callable[[int], None] = lambda step: None
) -> Round:
    """Send all calls at once and step until they are answered."""
    from vllm import SamplingParams

    core = engine.engine_core.engine_core
    rng = random.Random(11)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=calls.answer,
        ignore_eos=True,
        logprobs=1 if calls.log_probabilities else None,
    )
    for index in range(calls.count):
        prompt = [rng.randrange(*calls.vocabulary) for _ in range(calls.prompt)]
        sent = {"prompt_token_ids": prompt, "cache_salt": salt}
        engine.add_request(f"{salt}-{index}", sent, params)
    answers: dict[str, Any] = {}
    shapes: list[int] = []
    seen: set[str] = set()
    before = _report(core)["progress"]["scheduled_tokens_total"]
    for step in range(calls.count * (calls.prompt + calls.answer) + 1000):
        if len(answers) == calls.count:
            break
        between_steps(step)
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = output.outputs[0]
        report = _report(core)
        if report["progress"]["scheduled_tokens_total"] > before:
            shapes.append(report["progress"]["scheduled_tokens_total"] - before)
            before = report["progress"]["scheduled_tokens_total"]
        seen.update(name for name in ("full", "mixed", "none") if report["requests"][name])
    else:
        raise AssertionError(f"{salt}: not answered; {_report(core)['requests']}")
    in_order = [answers[f"{salt}-{index}"] for index in range(calls.count)]
    return Round(
        tokens=[list(one.token_ids) for one in in_order],
        log_probabilities=[
            [at[token].logprob for at, token in zip(one.logprobs, one.token_ids, strict=True)]
            for one in in_order
            if calls.log_probabilities
        ],
        shapes=shapes,
        residency=seen,
    )


def _require_equal(ample: Round, other: Round, name: str) -> None:
    if ample.shapes != other.shapes:
        at = next(
            (
                index
                for index, (a, b) in enumerate(zip(ample.shapes, other.shapes, strict=False))
                if a != b
            ),
            min(len(ample.shapes), len(other.shapes)),
        )
        raise AssertionError(
            f"{name}: step {at} had another shape than with room ({len(other.shapes)} steps for "
            f"{len(ample.shapes)}), so tokens prove nothing; give the engine more GPU blocks"
        )
    for call, (left, right) in enumerate(zip(ample.tokens, other.tokens, strict=True)):
        if left != right:
            at = next(
                index
                for index, pair in enumerate(zip(left, right, strict=True))
                if pair[0] != pair[1]
            )
            raise AssertionError(f"{name}: call {call} has another token at {at} than with room")
    for call, (left_p, right_p) in enumerate(
        zip(ample.log_probabilities, other.log_probabilities, strict=True)
    ):
        if left_p != right_p:
            off = max(abs(a - b) for a, b in zip(left_p, right_p, strict=True))
            raise AssertionError(
                f"{name}: call {call} has the same tokens, but log probabilities differ by {off:g}"
            )


def _report(core: Any) -> dict[str, Any]:
    return control(core, "report", {})


def _apply(core: Any, command: dict[str, Any]) -> None:
    control(core, "apply", command)
