"""What prompts read of their prefix on the host, and what other ways to read it would, on paper.

    python -m tests.bench.prefix_reads --traces FOLDER [docs/figures/study.md]

vLLM lets every GPU read all rows of the context that are not on it, for each chunk of a prompt and
in all layers. Here nothing of the prefix is on the GPU, as where GPU memory is short. The ways:
each GPU reads its part and all exchange; only rows that the chunk's tokens select; larger chunks.
Puts a table into the document; what the ways would gain is simulated (``study``, ``prefix``).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hisparsed.config.node_description import NodeDescription, load_node_description
from hisparsed.replay.trace import Trace, block_ids, load_trace
from hisparsed.simulate.workload import NAME, openhands_trace
from tests.bench.study import with_table

EXCHANGE_BYTES_S = 0.6 * 450e9
"""[assumed] What a GPU receives from the others: 60 % of NVLink's 450 GB/s each way."""
TABLE = "prefix-paper"
_CHUNKS = (1, 2, 4)
"""Chunk sizes, in those of the description."""


@dataclass(frozen=True, slots=True)
class Reads:
    """Means of the calls that follow another in their session."""

    context: float
    computed: float
    read_s: float
    """Today."""
    parts_s: float
    """Each GPU its part, then the exchange."""
    selected_s: float
    larger_s: tuple[float, ...]
    """Today, with chunks of ``_CHUNKS``."""


def follow_ups(trace: Trace) -> Iterator[tuple[int, int]]:
    """(tokens of the prompt, tokens of it that the call before does not have)."""
    for session in trace.sessions:
        before: set[int] = set()
        for number, call in enumerate(session.calls):
            blocks = list(block_ids(call.blocks))
            held = 0
            while held < len(blocks) and blocks[held] in before:
                held += 1
            if number:
                yield call.input_tokens, max(1, call.input_tokens - held * trace.block_tokens)
            before = set(blocks)


def union_rows(node: NodeDescription, tokens: int) -> float:
    """Distinct rows that ``tokens`` neighbouring tokens select: the description's union, extended
    by the exponent of its last two points."""
    union = node.rows.union
    if tokens <= len(union):
        return node.model.topk * union[tokens - 1]
    last = len(union)
    exponent = math.log(union[-1] / union[-2]) / math.log(last / (last - 1))
    return float(node.model.topk * union[-1] * (tokens / last) ** exponent)


def reads_of(node: NodeDescription, trace: Trace) -> Reads:
    """Raises ``ZeroDivisionError`` where no call follows another."""
    row_bytes = node.model.row_bytes * node.model.layers
    row_s = row_bytes / min(
        node.gpu.row_read_bandwidth, node.host.memory_bandwidth / node.gpu.count
    )
    others = 1 - 1 / node.gpu.count
    calls = list(follow_ups(trace))
    budget = node.engine.max_num_batched_tokens
    today = [_staged(context, new, budget) for context, new in calls]
    selected = [
        sum(min(start, union_rows(node, count)) for start, count in _chunks(context, new, budget))
        for context, new in calls
    ]
    rows = sum(today) / len(calls)
    return Reads(
        context=sum(context for context, _ in calls) / len(calls),
        computed=sum(new for _, new in calls) / len(calls),
        read_s=rows * row_s,
        parts_s=rows * (row_s / node.gpu.count + others * row_bytes / EXCHANGE_BYTES_S),
        selected_s=sum(selected) / len(calls) * row_s,
        larger_s=tuple(
            sum(_staged(context, new, budget * more) for context, new in calls) / len(calls) * row_s
            for more in _CHUNKS
        ),
    )


def _staged(context: int, new: int, budget: int) -> int:
    return sum(start for start, _ in _chunks(context, new, budget))


def _chunks(context: int, new: int, budget: int) -> Iterator[tuple[int, int]]:
    """(first position, tokens) of each chunk."""
    for start in range(context - new, context, budget):
        yield start, min(budget, context - start)


def table(node: NodeDescription, traces: dict[str, Trace]) -> str:
    larger = [f"{node.engine.max_num_batched_tokens * more // 1024}K" for more in _CHUNKS]
    heads = ["traffic", "prompt", "computed", "read today", "parts and exchange", "selected rows"]
    heads += [f"chunks of {size}" for size in larger]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for name, trace in traces.items():
        reads = reads_of(node, trace)
        times = (reads.parts_s, reads.selected_s, *reads.larger_s)
        cells = [name, f"{reads.context:,.0f}", f"{reads.computed:,.0f}"]
        cells.append(f"{reads.read_s * 1e3:.0f} ms")
        cells += [f"{one * 1e3:.0f} ms, {one / reads.read_s:.0%}" for one in times]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n" + "\n".join(lines) + "\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="What prompts read of their prefix on the host.")
    parser.add_argument("--node", default="8xh200-glm-5.3", help="node description")
    parser.add_argument("--traces", required=True, type=Path, help="folder with the traces")
    parser.add_argument("document", nargs="?", type=Path, default=Path("docs/figures/study.md"))
    given = parser.parse_args()
    agents = "claude-code-128k"
    traces = {agents: load_trace(given.traces / f"{agents}.jsonl.gz"), NAME: openhands_trace()}
    made = table(load_node_description(given.node), traces)
    text = given.document.read_text("utf-8")
    given.document.write_text(with_table(text, TABLE, made), "utf-8")


if __name__ == "__main__":
    main()
