"""One engine, the same calls: twice with room, from the host, and while levers move.

Where log probabilities are asked for, as on a card, rounds are compared by their distance
(``gpu_distances``): sound cards differ a little from batch to batch. Else greedy tokens must be
equal: each round sends the same prompts at the same time, so every step has the same shape; a
round whose steps have other shapes proves nothing and fails as such, and so does an engine that
answers differently with room each time. Prefixes are kept apart by a salt; the last round has
that of the first, with nothing of it left on the GPU, so its prefixes come from the offload pool.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_distances import CEILING, distance, tolerance_of
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
    """The answers; ``shapes``: tokens of each engine step."""

    tokens: list[list[int]]
    likely: list[list[tuple[int, dict[int, float]]]]
    """By call: each token and the log probabilities of the likeliest there, as asked for."""
    shapes: list[int]
    residency: set[str]
    cached: int
    """Prompt tokens that were not computed."""
    moves_ms: list[float] = field(default_factory=list)


def compare(engine: Any, calls: Calls, *, seed: int = 0) -> Figures:
    """Figures of rounds that agree. Raises ``AssertionError`` where they do not."""
    core = engine.engine_core.engine_core
    geometry = _report(core)["geometry"]
    _apply(core, {"offload_target_blocks": geometry["budget_blocks"] // 10})
    ample = play(engine, calls, "ample")
    again = play(engine, calls, "again")
    far = RoundDistance(ample, again)
    with Squeeze(core, calls) as squeeze:
        pressed = play(engine, calls, "pressed", squeeze.tight)
    with Squeeze(core, calls) as squeeze:
        mover = Mover(core, geometry, random.Random(seed), squeeze)
        moved = play(engine, calls, "moved", mover)
    moved.moves_ms = mover.took_ms
    with Squeeze(core, calls) as squeeze:
        squeeze.empty()
    loaded = play(engine, calls, "ample")
    far.require(pressed, "from the host")
    far.require(moved, "while levers moved")
    far.require(loaded, "from the offload pool", same_shapes=False)
    if not loaded.cached:
        raise AssertionError("no prefix came back, so nothing was loaded from the offload pool")
    if pressed.residency <= {"full"}:
        raise AssertionError("no request left the GPU, so nothing was read from the host")
    hot = _report(core)["hot"]
    return {
        "tokens_equal": sum(map(len, ample.tokens)),
        "offload_loaded_tokens": loaded.cached,
        **far.figures(),
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
        """Leave the blocks that the calls need to continue."""
        self.leave(_BLOCKS_A_CALL * self._calls.count)

    def leave(self, free: int) -> None:
        """Leave this many blocks free, more or fewer than before."""
        if _report(self._core)["hot"]["leased_requests"] < self._calls.count:
            return
        self._give_back()
        surplus = self._pool.get_num_free_blocks() - free
        if surplus > 0:
            self._taken = self._pool.get_new_blocks(surplus)

    def empty(self) -> None:
        """Take every free block once, so that no page of an ended call is left on the GPU."""
        self._give_back()
        free = self._pool.get_num_free_blocks()
        if free:
            self._taken = self._pool.get_new_blocks(free)

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
        logprobs=5 if calls.log_probabilities else None,
    )
    for index in range(calls.count):
        prompt = [rng.randrange(*calls.vocabulary) for _ in range(calls.prompt)]
        sent = {"prompt_token_ids": prompt, "cache_salt": salt}
        engine.add_request(f"{salt}-{index}", sent, params)
    answers: dict[str, Any] = {}
    cached = 0
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
                cached += output.num_cached_tokens or 0
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
        likely=[
            [
                (token, {other: found.logprob for other, found in at.items()})
                for at, token in zip(one.logprobs, one.token_ids, strict=True)
            ]
            for one in in_order
            if calls.log_probabilities
        ],
        shapes=shapes,
        residency=seen,
        cached=cached,
    )


class RoundDistance:
    """Of other rounds with ``ample``. Raises ``AssertionError`` where ``again``, which had room
    too, is so far from it that nothing can be proved."""

    def __init__(self, ample: Round, again: Round) -> None:
        self._ample = ample
        self._found: dict[str, float] = {}
        self._tolerance = CEILING
        name = "with room once more"
        if ample.likely:
            self._tolerance = tolerance_of(distance(ample.likely, again.likely, name, CEILING))
            return
        try:
            self.require(again, name)
        except AssertionError as error:
            raise AssertionError(f"{error}; so no other round can prove anything here") from None

    def require(self, other: Round, name: str, *, same_shapes: bool = True) -> None:
        """Raises ``AssertionError`` where ``other`` differs by more than it may."""
        if self._ample.likely:
            found = distance(self._ample.likely, other.likely, name, self._tolerance)
            self._found[name] = found.largest
            return
        if same_shapes:
            _require_shapes(self._ample, other, name)
        for call, (left, right) in enumerate(zip(self._ample.tokens, other.tokens, strict=True)):
            at = _first_difference(left, right)
            if at is not None:
                raise AssertionError(
                    f"{name}: call {call} has another token at {at} than with room"
                )

    def figures(self) -> Figures:
        """How rounds were compared, and how far apart they are."""
        if not self._ample.likely:
            return {"compared_by": "equal tokens"}
        distances = {f"distance {name}": round(one, 5) for name, one in self._found.items()}
        tolerance = round(self._tolerance, 5)
        return {"compared_by": "distance of log probabilities", "tolerance": tolerance, **distances}


def _require_shapes(ample: Round, other: Round, name: str) -> None:
    at = _first_difference(ample.shapes, other.shapes)
    if at is not None:
        raise AssertionError(
            f"{name}: step {at} had another shape than with room ({len(other.shapes)} steps for "
            f"{len(ample.shapes)}), so tokens prove nothing; give the engine more GPU blocks"
        )


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    if one == other:
        return None
    pairs = zip(one, other, strict=False)
    shorter = min(len(one), len(other))
    return next((at for at, (a, b) in enumerate(pairs) if a != b), shorter)


def _report(core: Any) -> dict[str, Any]:
    return control(core, "report", {})


def _apply(core: Any, command: dict[str, Any]) -> None:
    control(core, "apply", command)
