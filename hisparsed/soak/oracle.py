"""Proves sampled answers: an untouched engine with room for everything must give the same.

Both engines have the same weights, and a token depends on the tokens before it alone. Answers
are verified in batches, between the steps of the engine under test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from hisparsed.soak.engine import Engine

_BATCH = 24
_KNOWN = 4000
"""Answers that are kept, because clients send the same prompts again."""


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer as the engine under test gave it, whole or cut; ``step`` is when it ended."""

    request_id: str
    step: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """``sample`` differs from ``expected`` from token ``at`` on."""

    sample: Sample
    expected: tuple[int, ...]
    at: int


class Oracle:
    """``engine`` must be of the same model. ``verified`` counts answers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: list[Sample] = []
        self._known: dict[bytes, tuple[int, ...]] = {}
        self.verified = 0

    def take(self, sample: Sample) -> list[Difference]:
        """Verify at some time; the differences of a batch when one was due."""
        self._waiting.append(sample)
        return self.settle() if len(self._waiting) >= _BATCH else []

    def settle(self) -> list[Difference]:
        """Verify all that were taken."""
        samples, self._waiting = self._waiting, []
        self._ask([one for one in samples if len(self._answer(one)) < len(one.tokens)])
        found = []
        for sample in samples:
            self.verified += 1
            expected = self._answer(sample)[: len(sample.tokens)]
            if expected != sample.tokens:
                found.append(Difference(sample, expected, _first_unequal(expected, sample.tokens)))
        while len(self._known) > _KNOWN:
            del self._known[next(iter(self._known))]
        return found

    def _answer(self, sample: Sample) -> tuple[int, ...]:
        return self._known.get(_key(sample.prompt), ())

    def _ask(self, samples: Sequence[Sample]) -> None:
        wanted: dict[tuple[int, ...], int] = {}
        for sample in samples:
            wanted[sample.prompt] = max(len(sample.tokens), wanted.get(sample.prompt, 0))
        asked = {f"oracle-{index}": prompt for index, prompt in enumerate(wanted)}
        for request_id, prompt in asked.items():
            self._engine.add(request_id, prompt, wanted[prompt])
        while asked:
            for answer in self._engine.step():
                if answer.finished:
                    self._known[_key(asked.pop(answer.request_id))] = tuple(answer.tokens)


def _key(prompt: tuple[int, ...]) -> bytes:
    return blake2b(repr(prompt).encode(), digest_size=16).digest()


def _first_unequal(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))
