"""Drafts and their verification, token by token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hisparsed.engine.reference.model_folder import VOCAB_SIZE
from hisparsed.engine.reference.requests import RequestState
from hisparsed.engine.reference.sampling import NgramDraft, printable_mask, verify

GREEDY = SimpleNamespace(temperature=0.0, top_p=1.0, top_k=0, seed=None, min_tokens=0)


def request(tokens: list[int], row: int = 0) -> RequestState:
    return RequestState(
        row=row, tokens=tokens, params=None, prompt_len=len(tokens), known=len(tokens)
    )


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1]),
        ([7, 3, 8, 9, 3, 6, 3], [6, 3]),
        ([1, 2, 9, 5, 2, 8, 1, 2], [9, 5, 2]),
        ([1, 2, 3], []),
        ([4], []),
    ],
    ids=["continuation", "latest", "longest first", "nothing before", "one token"],
)
def test_draft_is_what_followed_the_same_tokens(tokens: list[int], draft: list[int]) -> None:
    assert NgramDraft(3).propose([request(tokens)]) == [draft]


def test_draft_follows_a_growing_request() -> None:
    drafts, growing = NgramDraft(2), request([1, 2, 3])
    drafts.propose([growing])
    growing.tokens.extend([4, 2])
    assert drafts.propose([growing]) == [[3, 4]]


def test_a_new_owner_of_a_row_starts_anew() -> None:
    drafts = NgramDraft(2)
    drafts.propose([request([1, 2, 1])])
    assert drafts.propose([request([5, 6, 1])]) == [[]]


def rows_that_choose(*tokens: int) -> list[torch.Tensor]:
    rows = [torch.zeros(VOCAB_SIZE) for _ in tokens]
    for row, token in zip(rows, tokens, strict=True):
        row[token] = 1.0
    return rows


@pytest.mark.parametrize(
    ("drafts", "emitted"),
    [
        ((50, 51, 52), [50, 51, 52, 53]),
        ((50, 99, 52), [50, 51]),
        ((99, 51, 52), [50]),
        ((50,), [50, 51]),
        ((), [50]),
    ],
    ids=["all right", "second wrong", "first wrong", "one draft", "none"],
)
def test_tokens_up_to_the_first_wrong_draft_and_its_correction(
    drafts: tuple[int, ...], emitted: list[int]
) -> None:
    logits = rows_that_choose(50, 51, 52, 53)[: 1 + len(drafts)]
    found = verify(logits, drafts, printable_mask(), GREEDY, request_id="r", generated=0)
    assert found == emitted
