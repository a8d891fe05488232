"""Ghost lists against a larger LRU cache, which is what they foretell."""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict

import pytest

from hisparsed.engine.host.ghost_list import GhostList, PrefixGhosts


def name(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


class Lru:
    """A cache of ``capacity`` blocks that reports its evictions and insertions to a ghost list."""

    def __init__(self, capacity: int, ghosts: GhostList | None = None) -> None:
        self.capacity, self.ghosts = capacity, ghosts
        self.blocks: OrderedDict[bytes, None] = OrderedDict()

    def use(self, block: bytes) -> bool:
        hit = block in self.blocks
        self.blocks[block] = None
        self.blocks.move_to_end(block)
        if self.ghosts is not None and not hit:
            self.ghosts.restored(block)
        if len(self.blocks) > self.capacity:
            gone, _ = self.blocks.popitem(last=False)
            if self.ghosts is not None:
                self.ghosts.evicted(gone)
        return hit


@pytest.mark.parametrize("extra", [1, 7, 40, 200])
def test_every_block_foretells_exactly_what_a_larger_cache_holds(extra: int) -> None:
    rng = random.Random(5)
    ghosts = GhostList(max_entries=500, sample_rate=1.0)
    small, large = Lru(50, ghosts), Lru(50 + extra)
    hits = foretold = 0
    for _ in range(8_000):
        block = name(round(rng.paretovariate(0.6)) % 600)
        needed = ghosts.extra_blocks(block)
        foretold += needed is not None and needed <= extra
        hits += large.use(block) and block not in small.blocks
        small.use(block)
    assert hits == foretold
    assert hits > 5


def test_a_sample_estimates_what_all_blocks_would_say() -> None:
    rng = random.Random(9)
    whole, part = GhostList(100_000, 1.0), GhostList(100_000, 1 / 8)
    caches = [Lru(2_000, whole), Lru(2_000, part)]
    served = [0.0, 0.0]
    for _ in range(60_000):
        block = name(rng.randrange(6_000))
        for index, cache in enumerate(caches):
            assert cache.ghosts is not None
            needed = cache.ghosts.extra_blocks(block)
            if needed is not None and needed <= 1_000:
                served[index] += 1 / cache.ghosts.sample_rate
            cache.use(block)
    assert served[1] == pytest.approx(served[0], rel=0.1)
    assert len(part) == pytest.approx(len(whole) / 8, rel=0.15)


@pytest.mark.parametrize("names", ["{}", "answer a 3 1 {}", "{}/7"])
def test_names_that_are_not_spread_evenly_are_sampled_evenly(names: str) -> None:
    ghosts = GhostList(10, 1 / 8)
    blocks = [names.format(number).encode() for number in range(8_000)]
    sampled = ghosts.sampled(blocks)
    assert len(sampled) == pytest.approx(1_000, rel=0.1)
    assert [block for block in blocks if ghosts.samples(block)] == list(sampled)


def test_memory_is_fixed_and_the_oldest_fall_off() -> None:
    ghosts = GhostList(max_entries=10, sample_rate=1.0)
    for number in range(1_000):
        ghosts.evicted(name(number))
        assert len(ghosts) <= 10
    assert ghosts.extra_blocks(name(989)) is None
    assert ghosts.extra_blocks(name(990)) == 10
    assert ghosts.extra_blocks(name(999)) == 1


def test_depth_is_told_in_host_blocks() -> None:
    ghosts = GhostList(max_entries=100, sample_rate=1.0, entries_per_block=18)
    for number in range(40):
        ghosts.evicted(name(number))
    assert [ghosts.extra_blocks(name(number)) for number in (39, 22, 21, 0)] == [1, 1, 2, 3]


def test_clearing_forgets_everything() -> None:
    ghosts = GhostList(10, 1.0)
    ghosts.evicted(name(1))
    ghosts.clear()
    assert (len(ghosts), ghosts.extra_blocks(name(1))) == (0, None)


def both(edges: tuple[int, ...] = (1, 2, 4)) -> PrefixGhosts:
    return PrefixGhosts(GhostList(100, 1.0), GhostList(100, 1.0), 64, edges)


CHAIN = [name(number) for number in range(4)]


def totals(points: object) -> list[int]:
    return [point.tokens for point in points]  # type: ignore[attr-defined]


def test_a_prefix_counts_up_to_the_largest_need_before_each_block() -> None:
    ghosts = both()
    # Block 1 was evicted before block 2, so it is deeper: two blocks more serve both.
    ghosts.hisparse.evicted(CHAIN[1])
    ghosts.hisparse.evicted(CHAIN[2])
    ghosts.looked_up(CHAIN, lambda block: block in (CHAIN[0], CHAIN[3]), lambda _: True)
    assert totals(ghosts.hisparse_points()) == [0, 3 * 64, 3 * 64]
    assert totals(ghosts.offload_points()) == [0, 0, 0]


def test_a_block_that_the_other_pool_lacks_ends_it() -> None:
    ghosts = both()
    for block in reversed(CHAIN):
        ghosts.hisparse.evicted(block)
    ghosts.looked_up(CHAIN, lambda _: False, lambda block: block in CHAIN[:2])
    assert totals(ghosts.hisparse_points()) == [64, 2 * 64, 2 * 64]


def test_a_block_that_was_never_there_ends_it() -> None:
    ghosts = both()
    ghosts.offload.evicted(CHAIN[0])
    ghosts.offload.evicted(CHAIN[2])
    ghosts.looked_up(CHAIN, lambda _: True, lambda _: False)
    assert totals(ghosts.offload_points()) == [0, 64, 64]


def test_what_is_held_by_both_is_no_gain() -> None:
    ghosts = both()
    ghosts.looked_up(CHAIN, lambda _: True, lambda _: True)
    assert totals(ghosts.hisparse_points()) == totals(ghosts.offload_points()) == [0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 1.0), "max_entries 0"),
        ((1, 0.0), "sample_rate 0.0"),
        ((1, 1.0, 0), "entries_per_block"),
    ],
)
def test_impossible_sizes_are_refused(arguments: tuple[float, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GhostList(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("edges", [(), (0, 1), (2, 1), (1, 1)])
def test_edges_must_rise(edges: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rising"):
        both(edges)


def test_both_lists_must_follow_the_same_blocks() -> None:
    with pytest.raises(ValueError, match="differ"):
        PrefixGhosts(GhostList(1, 1.0), GhostList(1, 0.5), 64, [1])
