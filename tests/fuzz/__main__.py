"""`make fuzz`: mutated documents and calls against a control side, in one process.

Exit code 1 when a fault was found; each is printed with the document that brought it about.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hisparsed.config.node import NodeConfig, load_node_config
from tests.fuzz.control_side import ControlSide, Fault, take_node_document
from tests.fuzz.mutate import Documents, calls, every_key

ETC = Path("etc")
_MOST_FAULTS = 20
_SHOWN = 600


def _documents(folder: Path, rng: random.Random) -> tuple[Iterator[bytes], Iterator[bytes]]:
    """Policies and documents of nodes."""
    full = folder / "full.yaml"
    full.write_text(every_key(), encoding="utf-8")
    policies = [full, full, *sorted(ETC.glob("polic*/*.yaml"))]
    nodes = [ETC / "hisparsed.yaml", *sorted(ETC.glob("profiles/*.yaml"))]
    return iter(Documents(policies, rng)), iter(Documents(nodes, rng))


def _running(folder: Path) -> NodeConfig:
    """The state with which a daemon runs while its document changes."""
    good = folder / "good.yaml"
    good.write_text("host_budget: 64MiB\n", encoding="utf-8")
    return load_node_config(good, memory_bytes=2**62).value


async def fuzz(folder: Path, *, documents: int, seed: int) -> list[str]:
    """The faults; of ``documents`` half are policies, a quarter nodes and a quarter calls."""
    rng = random.Random(seed)
    policies, nodes = _documents(folder, rng)
    running = _running(folder)
    side = ControlSide(folder)
    await side.open()
    asked = calls(rng)
    faults: list[str] = []
    path = folder / "node.yaml"
    for number in range(documents):
        given: object = b""
        try:
            if number % 4 < 2:
                given = next(policies)
                await side.take(given)
            elif number % 4 == 2:
                given = next(nodes)
                path.write_bytes(given)
                take_node_document(path, running)
            else:
                given = next(asked)
                await side.call(*given)
        except Fault as fault:
            faults.append(f"{fault}\n--- of ---\n{str(given)[:_SHOWN]}")
            if len(faults) == _MOST_FAULTS:
                break
    try:
        await side.close()
    except Fault as fault:
        faults.append(str(fault))
    sys.stdout.write(f"{side.accepted} policies accepted, {side.rejected} rejected\n")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)  # each rejection is logged, and none is news here
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        found = asyncio.run(fuzz(Path(folder), documents=asked.documents, seed=asked.seed))
    for fault in found:
        sys.stdout.write(f"\n{fault}\n")
    took_s = time.monotonic() - began_s
    sys.stdout.write(f"{asked.documents} documents, {len(found)} faults, {took_s:.0f} s\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
