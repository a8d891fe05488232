"""Answers of the reference model as other kernels would give them, and with harmed rows.

Noise: every product of the model is summed in three parts of random elements, each part and sum
rounded to the precision of one of several formats; parts and format are each answer's own. What
the exact model quantises, its integers, then differ now and then, and so do its top-k sets.

Harm: rows of the prompt are replaced by those of another text, after the prompt is computed and
before the answer is. All in batches over dense KV: no engine, no blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hisparsed.canary.verdict import Position, RecordedAnswer
from hisparsed.engine.reference.model import ReferenceModel, index_scores, make_weights
from hisparsed.engine.reference.model_folder import INDEX_DIM, ROW_BYTES, ReferenceGeometry
from hisparsed.engine.reference.sampling import natural_logits
from hisparsed.engine.reference.step import top_positions

GEOMETRY = ReferenceGeometry(
    layers=8,
    index_groups=2,
    hidden=128,
    heads=4,
    intermediate=256,
    vocab=264,
    index_topk=64,
    index_heads=2,
    max_model_len=512,
    seed=7,
)
PAGE = 16
_PARTS = 3
_BITS = (8, 11, 24)
"""Significant bits of bfloat16, half and single precision."""


class OtherRounding(TorchFunctionMode):
    """Products inside are those of other kernels. ``bits``: of each row of the batch."""

    def __init__(self, bits: torch.Tensor, generator: torch.Generator) -> None:
        super().__init__()
        self._bits = bits
        self._generator = generator

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.matmul, torch.bmm):
            return self._product(function, *args)
        return function(*args, **(kwargs or {}))

    def _product(self, function: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        rows, width = left.shape[0], left.shape[-1]
        part = torch.randint(_PARTS, (rows, width), generator=self._generator)
        part = part.view(rows, *(1,) * (left.dim() - 2), width)
        # A batch of products has a row an answer; a plain one may have several tokens of each.
        bits = self._bits.repeat_interleave(rows // len(self._bits))
        total: torch.Tensor | None = None
        for number in range(_PARTS):
            summand = function(left * (part == number), right)
            bits = bits.view(rows, *(1,) * (summand.dim() - 1))
            summand = _rounded(summand, bits)
            total = summand if total is None else _rounded(total + summand, bits)
        assert total is not None
        return total


def _rounded(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    _, exponent = torch.frexp(values)
    step = torch.exp2((exponent - bits).float())
    return torch.round(values / step) * step


class _Dense:
    """``KVAccess`` of a batch of answers of the same length, over whole tensors.

    ``rows`` int8 ``[layers, B, N, ROW_BYTES]``, keys and scales ``[groups, B, N, ...]``; this
    step has tokens ``[start, start + count)`` of each.
    """

    def __init__(self, batch: int, length: int) -> None:
        layers, groups = GEOMETRY.layers, GEOMETRY.index_groups
        self.rows = torch.zeros((layers, batch, length, ROW_BYTES), dtype=torch.int8)
        self._keys = torch.zeros((groups, batch, length, INDEX_DIM))
        self._scales = torch.zeros((groups, batch, length))
        self._batch = batch
        self._span = slice(0, 0)
        self._chosen = torch.zeros(0)

    def copy(self) -> _Dense:
        made = _Dense.__new__(_Dense)
        made.__dict__.update(
            {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in self.__dict__.items()
            }
        )
        return made

    def step(self, start: int, count: int) -> torch.Tensor:
        self._span = slice(start, start + count)
        return torch.arange(start, start + count).repeat(self._batch)

    def write_rows(self, layer: int, rows: torch.Tensor) -> None:
        self.rows[layer][:, self._span] = rows.view(self._batch, -1, ROW_BYTES)

    def write_index_rows(self, group: int, keys: torch.Tensor, scales: torch.Tensor) -> None:
        self._keys[group][:, self._span] = keys.view(self._batch, -1, INDEX_DIM).float()
        self._scales[group][:, self._span] = scales.view(self._batch, -1)

    def select(self, group: int, query: torch.Tensor, head_weight: torch.Tensor) -> None:
        count = self._span.stop - self._span.start
        keys = self._keys[group][:, : self._span.stop].repeat_interleave(count, dim=0)
        scales = self._scales[group][:, : self._span.stop].repeat_interleave(count, dim=0)
        scores = (index_scores(query, head_weight, keys) * scales).clamp(min=0.0)
        lengths = torch.arange(self._span.start + 1, self._span.stop + 1).repeat(self._batch)
        self._chosen = top_positions(scores, lengths, GEOMETRY.index_topk)

    def read_rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        count = self._span.stop - self._span.start
        owner = torch.arange(self._batch).repeat_interleave(count).unsqueeze(1)
        return self.rows[layer][owner, self._chosen.clamp(min=0).long()], self._chosen >= 0


@dataclass(frozen=True)
class Harm:
    """``places`` rows at random places, or one page of them; in one layer or in all."""

    name: str
    rows: int
    page: bool
    all_layers: bool


HARMS = tuple(
    Harm(f"{name}, {'all layers' if whole else 'one layer'}", rows, page, whole)
    for name, rows, page in (
        ("1 row", 1, False),
        ("8 rows", 8, False),
        ("64 rows", 64, False),
        ("one page", PAGE, True),
    )
    for whole in (False, True)
)


class Recorder:
    """``prompt`` and ``answer_tokens`` of a canary; all randomness from ``seed``."""

    def __init__(self, prompt: Sequence[int], answer_tokens: int, logprobs: int, seed: int) -> None:
        self._prompt = torch.tensor(list(prompt))
        self._answer = answer_tokens
        self._logprobs = logprobs
        self._model = ReferenceModel(GEOMETRY, make_weights(GEOMETRY))
        self._generator = torch.Generator().manual_seed(seed)
        self._other: torch.Tensor | None = None

    @contextmanager
    def _noise(self, batch: int, noisy: bool) -> Iterator[None]:
        if not noisy:
            yield
            return
        bits = torch.tensor(_BITS)[torch.randint(len(_BITS), (batch,), generator=self._generator)]
        with OtherRounding(bits, self._generator):
            yield

    @torch.inference_mode()
    def prefill(self, batch: int, *, noisy: bool = True) -> _Dense:
        """KV of the prompt, computed ``batch`` times."""
        return self._prefill(self._prompt, batch, noisy)

    def _prefill(self, prompt: torch.Tensor, batch: int, noisy: bool) -> _Dense:
        kv = _Dense(batch, len(prompt) + self._answer)
        positions = kv.step(0, len(prompt) - 1)
        with self._noise(batch, noisy):
            self._model.forward(prompt[:-1].repeat(batch), positions, kv)
        return kv

    @torch.inference_mode()
    def decode(self, kv: _Dense, *, noisy: bool = True) -> list[RecordedAnswer]:
        """An answer from each of the batch's KV, which is left as it was."""
        kv = kv.copy()
        batch = kv.rows.shape[1]
        tokens = self._prompt[-1].repeat(batch)
        positions: list[list[Position]] = [[] for _ in range(batch)]
        with self._noise(batch, noisy):
            for number in range(self._answer):
                at = kv.step(len(self._prompt) - 1 + number, 1)
                hidden = self._model.forward(tokens, at, kv)
                logits = natural_logits(self._model.logits(hidden))
                scores = torch.log_softmax(logits, dim=-1)
                tokens = scores.argmax(dim=-1)
                best = scores.topk(self._logprobs, dim=-1)
                rows = zip(
                    positions,
                    tokens.tolist(),
                    best.indices.tolist(),
                    best.values.tolist(),
                    strict=True,
                )
                for answer, token, ids, values in rows:
                    answer.append(Position(token, dict(zip(ids, values, strict=True))))
        return [tuple(answer) for answer in positions]

    @torch.inference_mode()
    def harmed(self, kv: _Dense, harm: Harm) -> tuple[_Dense, _Dense]:
        """KV as it is read from the host alone, and where every other page is on the GPU.

        Each call of the batch has its own places, in pages that can leave the GPU.
        """
        if self._other is None:
            other = torch.randint(32, 127, (len(self._prompt),), generator=self._generator)
            self._other = self._prefill(other, 1, noisy=False).rows[:, 0]
        none, mixed = kv.copy(), kv.copy()
        pages = len(self._prompt) // PAGE - 1
        for one in range(kv.rows.shape[1]):
            if harm.page:
                first = PAGE * int(torch.randint(pages, (), generator=self._generator))
                places = torch.arange(first, first + PAGE)
            else:
                places = torch.randperm(pages * PAGE, generator=self._generator)[: harm.rows]
            layer = int(torch.randint(GEOMETRY.layers, (), generator=self._generator))
            layers = slice(None) if harm.all_layers else slice(layer, layer + 1)
            none.rows[layers, one, places] = self._other[layers, places]
            places = places[places // PAGE % 2 == 0]
            mixed.rows[layers, one, places] = self._other[layers, places]
        return none, mixed


@dataclass(frozen=True)
class Recording:
    """Answers of other kernels. ``clean``: several from each KV of the prompt. ``harmed``: of each
    trial the held answers of two rounds (none, mixed, none, mixed) by the name of the harm."""

    clean: list[list[RecordedAnswer]]
    harmed: dict[str, list[list[RecordedAnswer]]]


def record(
    recorder: Recorder, *, prefills: int, answers: int, trials: int, tell: Callable[[str], None]
) -> Recording:
    """``trials`` of each harm, in KV of which ``prefills`` are computed."""
    batches = [recorder.prefill(_BATCH) for _ in range(-(-prefills // _BATCH))]
    tell(f"{len(batches) * _BATCH} prompts computed")
    clean: list[list[RecordedAnswer]] = []
    for kv in batches:
        several = [recorder.decode(kv) for _ in range(answers)]
        clean.extend([list(one) for one in zip(*several, strict=True)])
        tell(f"{len(clean) * answers} clean answers")
    harmed: dict[str, list[list[RecordedAnswer]]] = {}
    for harm in HARMS:
        found: list[list[RecordedAnswer]] = []
        for number in range(-(-trials // _BATCH)):
            kv = batches[number % len(batches)]
            several = [recorder.decode(one) for one in 2 * recorder.harmed(kv, harm)]
            found.extend([list(one) for one in zip(*several, strict=True)])
        harmed[harm.name] = found[:trials]
        tell(f"{harm.name}: {trials} trials")
    return Recording(clean, harmed)


_BATCH = 32
