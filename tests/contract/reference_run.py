"""A short life of the reference node in this process: pools move, GPU memory is tight; as JSON."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

CALLS, TURNS, ANSWER = 4, 3, 32
MOVES = ((40, 1.0), (10, 2.0), (60, 1.5))
"""Lent host blocks and multiplier of each turn."""


def main(state: Path) -> dict[str, Any]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from hisparsed.config.node import NodeConfig
    from hisparsed.config.sections import ReferenceConfig
    from hisparsed.engine.compat.adapters import make_arg_parser
    from hisparsed.policy.decisions import EngineCommand
    from hisparsed.policy.signals import AdmissionOrder, AdmissionRules
    from hisparsed.soak.engine import InProcessEngine, SteppedClock

    clock = SteppedClock()
    config = NodeConfig(
        node="reference",
        host_budget=64 << 20,
        state_dir=state,
        reference=ReferenceConfig(
            gpu_blocks=260, max_model_len=1024, max_num_seqs=CALLS, max_num_batched_tokens=256
        ),
    )
    engine = InProcessEngine(config, max_multiplier=2.0, clock=clock)
    rng = random.Random(1)
    prompts = [[rng.randrange(32, 127) for _ in range(300 + 40 * index)] for index in range(CALLS)]
    result: dict[str, Any] = {"vllm": vllm.__version__, "tokens": [], "prefix_hits": 0}
    host_only = 0
    for turn, (lent, multiplier) in enumerate(MOVES[:TURNS]):
        engine.apply(
            EngineCommand(
                offload_target_blocks=lent,
                multiplier=multiplier,
                admission=AdmissionRules(
                    AdmissionOrder.HELD_PREFIX_FIRST, 30.0, max_running=CALLS - turn
                ),
            )
        )
        for index, prompt in enumerate(prompts):
            engine.add(f"{turn}-{index}", prompt, ANSWER)
        open_calls = CALLS
        while open_calls:
            clock.now_s += 0.01
            for answer in engine.step():
                if answer.finished:
                    open_calls -= 1
                    prompts[int(answer.request_id.split("-")[1])].extend(answer.tokens)
                    result["prefix_hits"] += answer.cached_tokens
            resident = engine.core.scheduler.hisparsed.resident_managers
            host_only = max(host_only, sum(sum(one.host_only_pages.values()) for one in resident))
    result["tokens"] = prompts
    result["violations"] = engine.check()
    result["host_only_pages"] = host_only
    result["lent_blocks"] = engine.report().offload.lent_blocks
    engine.close()
    make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "any"])
    return result


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]))) + "\n")
