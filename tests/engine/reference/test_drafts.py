"""Drafts: what followed the same tokens before."""

from __future__ import annotations

import pytest

from hisparsed.engine.reference.drafts import NgramDraft
from hisparsed.engine.reference.requests import RequestState


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
