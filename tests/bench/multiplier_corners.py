"""The corners of the multiplier's map, what each size serves there, and what knowing them gains.

A corner is a node (drafts, row reads hidden by computing, misses, requests that differ) under one
traffic (answer, context, users, first prompts). Over several corners, all count alike: equal time
in each, in parts of what the best size serves there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from hisparsed.config.node_description import NodeDescription
from hisparsed.plan.layout import simulated_layout
from hisparsed.policy.bounds import vllm_multiplier
from hisparsed.simulate.sizes import MOST_LEASE_ROWS
from hisparsed.simulate.workload import TURNS
from tests.bench.multiplier_model import ClosedForm, Traffic, variant

ANSWERS = (200, 600, 2_000, 6_000, 20_000)
CONTEXTS = (16_384, 32_768, 65_536, 131_072, 262_144)
USERS = (8, 32, None)
"""Calls at a time; ``None``: as many as the host memory holds, of the requests that may run."""
FIRST = (0.0, 1 / TURNS)
HIDDEN = (0.0, 0.5, 0.9)
MISSES = (1.0, 1.5)
SPREADS = (0.0, 1.0)
WORTH = 0.02
"""The least gain of an oracle for which a lever is worth building."""
ACROSS_NODES, AT_RANDOM = 6, 6
"""Corners to simulate in addition to one of each node."""
MIXES: Mapping[str, Sequence[tuple[int, int]]] = {
    "agents, reasoning": ((200, 65_536), (20_000, 16_384)),
    "agents, documents": ((200, 65_536), (2_000, 262_144)),
    "all four": ((200, 65_536), (20_000, 16_384), (2_000, 262_144), (600, 32_768)),
}
"""Traffic that changes between corners, [answer, context] of each, for as long in each."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is fixed when a node is built."""

    drafts: int
    hidden: float
    misses: float
    spread: float

    def of(self, node: NodeDescription) -> NodeDescription:
        return variant(
            node, drafts=self.drafts, hidden=self.hidden, misses=self.misses, spread=self.spread
        )


@dataclass(frozen=True, slots=True)
class Corner:
    setting: Setting
    traffic: Traffic


@dataclass(frozen=True, slots=True)
class Sizes:
    """Calls per hour of one corner by multiplier; sizes with which no call fits are skipped."""

    corner: Corner
    calls: Mapping[float, float]

    @property
    def best(self) -> float:
        return max(self.calls, key=lambda size: self.calls[size])

    def share(self, size: float) -> float:
        """The share of the best size's calls."""
        return self.calls.get(size, 0.0) / self.calls[self.best]


def sizes_of(node: NodeDescription) -> list[float]:
    """A half top-k apart, up to what a hot buffer can number."""
    most = MOST_LEASE_ROWS / node.model.topk
    return [half / 2 for half in range(2, int(2 * most) + 1)]


def settings(node: NodeDescription) -> list[Setting]:
    drafts = sorted({0, node.engine.speculative_tokens})
    return [Setting(*one) for one in product(drafts, HIDDEN, MISSES, SPREADS)]


def traffics(node: NodeDescription) -> list[Traffic]:
    found = []
    for answer, context, users, first in product(ANSWERS, CONTEXTS, USERS, FIRST):
        held = held_calls(node, context + answer)
        found.append(Traffic(context, answer, first, min(users or held, held)))
    return list(dict.fromkeys(found))


def held_calls(node: NodeDescription, tokens: int) -> int:
    """Calls of this many tokens that the host memory holds, of those that may run."""
    layout = simulated_layout(node)
    held = node.host.budget / (layout.host_token_bytes + layout.offload_token_bytes)
    return min(node.engine.max_num_seqs, int(held / tokens))


def evaluate(node: NodeDescription, chosen: Iterable[Setting]) -> list[Sizes]:
    """Every corner of the ``chosen`` settings with every size, but for those where all pages fit
    the GPU: they have no hot buffers."""
    found, sizes, every = [], sizes_of(node), traffics(node)
    for setting in chosen:
        form = ClosedForm(setting.of(node))
        for traffic in every:
            calls = {}
            for size in sizes:
                steady = form.steady(traffic, size)
                if steady is not None:
                    calls[size] = steady.calls_per_s * 3600
            if len(set(calls.values())) > 1:
                found.append(Sizes(Corner(setting, traffic), calls))
    return found


def most_hidden(node: NodeDescription, drafts: int) -> float:
    """Share of the row reads that vLLM can hide, by reading 0.30 to 0.33: in a step that only
    decodes, one row a request, it stages the layers behind each indexer layer on a stream of their
    own while the layers before them compute; with drafts, or beside prefill, it stages none."""
    model = node.model
    return 0.0 if drafts else 1 - len(model.index_leaders()) / model.layers


def mixed(corners: Sequence[Sizes], name: str) -> list[Sizes]:
    """Of ``corners``, those of a mix, with as many users as fit the host and prefixes held."""
    return [
        one
        for answer, context in MIXES[name]
        for one in corners
        if (one.corner.traffic.answer, one.corner.traffic.context) == (answer, context)
        and one.corner.traffic.first == 0
        and one.corner.traffic.users > max(users for users in USERS if users)
    ]


# --- oracles --------------------------------------------------------------------------------


def single(corners: Sequence[Sizes]) -> float:
    """The size that serves most of what the best size of each corner serves."""
    every = sorted({size for one in corners for size in one.calls})
    return max(every, key=lambda size: mean(one.share(size) for one in corners))


def gain(corners: Sequence[Sizes], chosen: Callable[[Sizes], float]) -> float:
    """The gain of always knowing the corner over ``chosen`` sizes."""
    return 1 / mean(one.share(chosen(one)) for one in corners) - 1


def mean(values: Iterable[float]) -> float:
    every = list(values)
    return sum(every) / len(every)


def singles_by(
    corners: Sequence[Sizes], key: Callable[[Corner], object]
) -> Callable[[Sizes], float]:
    """The best single size of each group of corners."""
    groups: dict[object, list[Sizes]] = {}
    for one in corners:
        groups.setdefault(key(one.corner), []).append(one)
    size = {group: single(members) for group, members in groups.items()}
    return lambda one: size[key(one.corner)]


def vllms(corner: Corner) -> float:
    return vllm_multiplier(1 + corner.setting.drafts)


def to_simulate(corners: Sequence[Sizes], seed: int = 0) -> list[Sizes]:
    """Fixed before any is simulated, of nodes whose requests are alike: the corner of each node
    where its own best size loses most; the traffics where one size for each number of drafts
    loses most, each once; and some of the other corners at random."""
    alike = [one for one in corners if one.corner.setting.spread == 0]
    own = singles_by(alike, lambda corner: corner.setting)
    by_drafts = singles_by(alike, lambda corner: corner.setting.drafts)
    of_nodes: dict[Setting, Sizes] = {}
    for one in sorted(alike, key=lambda one: one.share(own(one))):
        of_nodes.setdefault(one.corner.setting, one)
    chosen = list(of_nodes.values())
    seen: set[Traffic] = set()
    for one in sorted(alike, key=lambda one: one.share(by_drafts(one))):
        if len(seen) < ACROSS_NODES and one.corner.traffic not in seen and one not in chosen:
            seen.add(one.corner.traffic)
            chosen.append(one)
    rest = [one for one in alike if one not in chosen]
    return [*chosen, *random.Random(seed).sample(rest, AT_RANDOM)]
