"""The rows that a prefill node keeps for a decode node, and for how long."""

from __future__ import annotations

import threading

import pytest

from hisparsed.engine.reference.handoff.server import Ended, Offer, Offers
from hisparsed.engine.reference.handoff.transfer import (
    PIECE_TOKENS,
    HandoffError,
    pieces,
    prefix_digest,
)

TOKENS = [5, 6, 7, 8]


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def offer(ticket: str = "a", expires_s: float = 160.0) -> Offer:
    return Offer(f"request-{ticket}", ticket, TOKENS, [1], [2], expires_s)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def offers(clock: Clock) -> Offers:
    return Offers(clock, grace_s=0.0)


def test_an_offer_is_found_by_its_ticket_and_the_readers_own_tokens(offers: Offers) -> None:
    offers.add(offer())
    for tokens in (1, 4):
        assert offers.find("a", tokens, prefix_digest(TOKENS[:tokens])).request_id == "request-a"


@pytest.mark.parametrize(
    ("ticket", "tokens", "digest", "reason"),
    [
        ("b", 4, prefix_digest(TOKENS), "is not offered"),
        ("a", 5, prefix_digest([*TOKENS, 9]), "5 tokens were asked for; the prefix has 4"),
        ("a", 0, prefix_digest([]), "0 tokens were asked for"),
        ("a", 4, prefix_digest([5, 6, 7, 9]), "not those of the reader's prompt"),
    ],
)
def test_anything_else_is_refused_with_a_reason(
    offers: Offers, ticket: str, tokens: int, digest: str, reason: str
) -> None:
    offers.add(offer())
    with pytest.raises(HandoffError, match=reason):
        offers.find(ticket, tokens, digest)


def test_a_lease_ends_at_its_second_and_not_before(offers: Offers, clock: Clock) -> None:
    offers.add(offer())
    clock.now_s = 159.9
    offers.expire()
    assert offers.take_ended() == []
    clock.now_s = 160.0
    offers.expire()
    assert [(one.ticket, how) for one, how in offers.take_ended()] == [("a", Ended.EXPIRED)]
    assert len(offers) == 0


def test_an_offer_ends_once_however_often_it_is_read(offers: Offers, clock: Clock) -> None:
    offers.add(offer())
    offers.read("a")
    offers.read("a")
    clock.now_s = 999.0
    offers.expire()
    assert [how for _, how in offers.take_ended()] == [Ended.READ]
    assert offers.take_ended() == []


def test_a_reader_under_way_reads_nothing_after_the_end(offers: Offers) -> None:
    offers.add(offer())
    with offers.reading("a"):
        pass
    offers.read("a")
    with pytest.raises(HandoffError, match="its lease has ended"), offers.reading("a"):
        pytest.fail("the blocks may be another request's by now")


def test_an_offer_cannot_end_while_a_piece_of_it_is_read(offers: Offers, clock: Clock) -> None:
    offers.add(offer())
    clock.now_s = 999.0
    expiry = threading.Thread(target=offers.expire)
    with offers.reading("a"):
        expiry.start()
        expiry.join(timeout=0.05)
        assert len(offers) == 1
    expiry.join()
    assert len(offers) == 0


def test_a_reader_may_be_ahead_of_the_step_that_makes_the_offer(clock: Clock) -> None:
    offers = Offers(clock, grace_s=30.0)
    late = threading.Timer(0.01, offers.add, [offer()])
    late.start()
    assert offers.find("a", 4, prefix_digest(TOKENS)).ticket == "a"
    late.join()


def test_pieces_cover_each_kind_once_from_where_the_reader_starts() -> None:
    tokens = 2 * PIECE_TOKENS + 7
    for kind, first in (("rows", 300), ("index", 0)):
        covered = [
            token
            for piece in pieces(300, 0, tokens)
            if piece.kind == kind
            for token in range(piece.start, piece.end)
        ]
        assert covered == list(range(first, tokens))
    assert list(pieces(tokens, tokens, tokens)) == []
