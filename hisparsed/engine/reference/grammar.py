"""Structured outputs on the reference node: vLLM's grammar bitmask, and a model that ends.

The weights are random, so a string or a list that the grammar lets continue might never end. Where
a grammar is in force, and only there, tokens that close something are preferred: the end of the
answer, then closing brackets and quotes, and so on by ``_LEVELS``. An empty answer is the
exception, since it is of no use: if a tool may be called or not (``tool_choice: auto``), the
grammar allows it to end at once. No token is forced: the grammar allows the whole answer, and an
answer that reaches ``max_tokens`` is cut as any.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from hisparsed.engine.reference.model_folder import EOS_TOKEN_ID, VOCAB_SIZE

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput

_STEP = 100.0
"""Natural units between two levels: far more than logits of the model differ."""

_WHITE, _OPENING, _COMMA, _QUOTE, _CLOSING = b" \t\r\n", b"[{", b",", b'"', b"]}"
_LEVELS = ((_OPENING, 1), (_COMMA, 3), (_QUOTE, 4), (_CLOSING, 5), ((EOS_TOKEN_ID,), 6))
_LEVEL_OF_OTHERS = 2
"""Text that does not open, close or separate and is not white space, which has level 0."""


def _bias(levels: Iterable[tuple[Iterable[int], int]], others: int) -> torch.Tensor:
    bias = torch.full((VOCAB_SIZE,), others * _STEP)
    for tokens, level in levels:
        bias[list(tokens)] = level * _STEP
    return bias


_BETWEEN = _bias(((_WHITE, 0), *_LEVELS), _LEVEL_OF_OTHERS)
"""Preference outside strings."""
_IN_TEXT = _bias(((_QUOTE, 4), ((EOS_TOKEN_ID,), 6)), 0)
"""Preference where any letter may come: a bracket there is only a character."""
_ANY_VALUE = _bias(((b"{", 6),), 0)
"""Preference where any JSON value may come, as in a tool's arguments without a schema: callers
expect an object, and it can end at once."""
_LETTERS = torch.tensor(list(string.ascii_letters.encode()))
_FIRST_OF_TEXT = _bias(((string.ascii_letters.encode(), 1),), 0)
"""Preference at the start of an answer's text."""
_NEVER_FIRST = -_STEP
_VALUES = torch.tensor(list(b'{["-0tfn'))


def allowed_tokens(bitmask: npt.NDArray[np.int32]) -> torch.Tensor:
    """vLLM's grammar bitmask ``[N, words]`` as bool ``[N, VOCAB_SIZE]``."""
    packed = np.ascontiguousarray(bitmask, dtype="<i4").view(np.uint8)
    bits = np.unpackbits(packed, axis=1, count=VOCAB_SIZE, bitorder="little")
    return torch.from_numpy(bits.astype(np.bool_))


def closing_bias(allowed: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """The values to add to the logits of rows whose grammar allows ``allowed``, both ``[N,
    VOCAB_SIZE]``; 0 where everything is allowed, as in a reasoning part.

    ``begins``, bool ``[N]``: rows of answers that have nothing yet.
    """
    free_text = allowed[:, _LETTERS].all(dim=1, keepdim=True)
    any_value = allowed[:, _VALUES].all(dim=1, keepdim=True)
    outside = torch.where(any_value, _ANY_VALUE, _BETWEEN)
    bias = torch.where(free_text, _IN_TEXT, outside)
    bias[begins & free_text[:, 0]] = _FIRST_OF_TEXT
    bias[begins, EOS_TOKEN_ID] = _NEVER_FIRST
    return bias.masked_fill(allowed.all(dim=1, keepdim=True), 0.0)


def allowed_by_request(
    grammar: GrammarOutput | None, scheduled_drafts: Mapping[str, Sequence[int]]
) -> dict[str, torch.Tensor]:
    """Allowed tokens of each request under a grammar, bool ``[1 + drafts, VOCAB_SIZE]``.

    ``scheduled_drafts`` as vLLM's scheduler names them, its padding included.
    """
    if grammar is None:
        return {}
    masks = allowed_tokens(grammar.grammar_bitmask)
    allowed: dict[str, torch.Tensor] = {}
    start = 0
    for request_id in grammar.structured_output_request_ids:
        end = start + 1 + len(scheduled_drafts.get(request_id, ()))
        allowed[request_id] = masks[start:end]
        start = end
    return allowed
