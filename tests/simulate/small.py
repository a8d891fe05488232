"""A small described node, small traffic, and what a run measured, made up.

Engines of this node start in a second or two.
"""

from __future__ import annotations

from typing import Any

from hisparsed.config.node_description import NodeDescription, load_node_description
from hisparsed.replay.trace import BlockRun, Call, Session, Trace
from hisparsed.simulate.results import CallTimes, Measures, Sample

LAYERS = 8
MIB = 1 << 20


def small_node(**changes: object) -> NodeDescription:
    """An H200 node with a small model; ``changes`` are by section, as dicts."""
    tree = load_node_description("8xh200-glm-5.3").model_dump()
    sections: dict[str, dict[str, object]] = {
        "model": {"layers": LAYERS, "topk": 64, "max_model_len": 8192},
        "gpu": {"kv_memory": 24 * MIB},
        "host": {"budget": 96 * MIB},
        "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 1024},
    }
    for section, values in changes.items():
        assert isinstance(values, dict)
        sections.setdefault(section, {}).update(values)
    for section, values in sections.items():
        tree[section].update(values)
    return NodeDescription.model_validate(tree)


def agents(sessions: int, calls: int, first: int = 1500, more: int = 200) -> Trace:
    """Sessions whose prompts grow by ``more`` tokens per call; answers are 100 tokens of that."""
    made = []
    for number in range(sessions):
        base = number << 40
        made.append(
            Session(
                f"s{number}",
                tuple(
                    _call(base, first + turn * more + number * 64, 5.0 if turn else 0.0)
                    for turn in range(calls)
                ),
                0.0,
            )
        )
    return Trace("agents", 64, tuple(made))


def chat(requests: int, every_s: float, tokens: int = 800) -> Trace:
    """Separate requests that start when the trace says."""
    made = [
        Session(f"r{number}", (_call(number << 40, tokens, 0.0),), number * every_s)
        for number in range(requests)
    ]
    return Trace("chat", 64, tuple(made))


def _call(base: int, tokens: int, think_s: float) -> Call:
    full = tokens // 64
    return Call((BlockRun(base, full),), base + full, tokens, 100, think_s, None)


def sample(at_s: float, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "running": 2,
        "waiting": 1,
        "hisparse_blocks": 90,
        "offload_blocks": 10,
        "hisparse_reach_tokens": 1000,
        "offload_reach_tokens": 800,
        "live_tokens": 400,
        "multiplier": 1.0,
        "gpu_free_blocks": 5,
        "hit_tokens": 0,
        "prompt_tokens": 0,
        "generated_tokens": int(at_s * 10),
        "link_bytes": at_s * 100.0,
        "core_s": at_s * 0.2,
    }
    return Sample(at_s=at_s, **{**values, **changes})


def call(arrived: float, first: float, end: float, play: str = "a", cached: int = 60) -> CallTimes:
    return CallTimes(play, 0, 100, 11, arrived, first, end, cached)


def measured(*calls: CallTimes) -> Measures:
    return Measures(10.0, 110.0, calls=list(calls), samples=[sample(10.0), sample(110.0)])
