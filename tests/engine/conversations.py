"""Drives vLLM's engine in this process, step by step, through many growing conversations.

No clock and no threads: the same conversations on another slab, or with levers moved between
steps, must give the same tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hisparsed.engine.cuda.launch import ASYNC_SCHEDULER
from hisparsed.engine.plugin import control
from hisparsed.engine.reference.handoff.worker import HandoffOptions
from hisparsed.engine.reference.model_folder import model_config, write_model_folder
from hisparsed.engine.reference.vllm_config import ReferenceOptions, build_vllm_config

BLOCK = 16
TOPK = 64


@dataclass(frozen=True)
class EngineShape:
    """The differences between the runs that are compared."""

    gpu_blocks: int = 6000
    host_budget_bytes: int = 96 << 20
    max_num_seqs: int = 12
    max_num_batched_tokens: int = 256
    max_model_len: int = 2048
    max_multiplier: int = 4
    ack_lag_steps: int = 1
    seed: int = 7
    speculative_tokens: int = 0
    block_size: int = BLOCK
    eager_host_mirror: bool = True
    handoff: HandoffOptions | None = None
    overlap: bool = False
    """vLLM's asynchronous scheduler, for workers that are scripted: two steps in flight."""


def build_engine(folder: Path, shape: EngineShape) -> Any:
    """An in-process ``LLMEngine`` on the reference executor; its core has ``control``."""
    from vllm.v1.engine.llm_engine import LLMEngine

    model_folder = write_model_folder(
        folder / f"model-{shape.max_model_len}-{shape.seed}",
        model_config(
            layers=8,
            index_groups=2,
            index_topk=TOPK,
            max_model_len=shape.max_model_len,
            seed=shape.seed,
        ),
    )
    options = ReferenceOptions(
        model_folder=model_folder,
        host_budget_bytes=shape.host_budget_bytes,
        gpu_blocks=shape.gpu_blocks,
        max_lease_rows=shape.max_multiplier * TOPK,
        max_model_len=shape.max_model_len,
        block_size=shape.block_size,
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        ack_lag_steps=shape.ack_lag_steps,
        threads=1,
        served_model_name="reference",
        engine_args={},
        speculative_tokens=shape.speculative_tokens,
        eager_host_mirror=shape.eager_host_mirror,
        handoff=shape.handoff,
    )
    config = build_vllm_config(options)
    if shape.overlap:
        config.scheduler_config.async_scheduling = True
        config.scheduler_config.scheduler_cls = ASYNC_SCHEDULER
    return LLMEngine.from_vllm_config(config)


def core_of(engine: Any) -> Any:
    return engine.engine_core.engine_core


def report(engine: Any) -> dict[str, Any]:
    return control(core_of(engine), "report", {})


def apply(engine: Any, command: Mapping[str, Any]) -> dict[str, Any]:
    return control(core_of(engine), "apply", dict(command))


def text(tokens: int, seed: int | str) -> list[int]:
    """Printable bytes at random, the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(32, 127) for _ in range(tokens)]


def ask(engine: Any, name: str, prompt: list[int], answer_tokens: int, **sampling: Any) -> None:
    """Send one call, greedy where ``sampling`` does not say otherwise."""
    from vllm import SamplingParams

    params = SamplingParams(
        **{"temperature": 0.0, "max_tokens": answer_tokens, "ignore_eos": True, **sampling}
    )
    engine.add_request(name, {"prompt_token_ids": prompt}, params)


def finish(engine: Any, most_steps: int = 5_000) -> dict[str, Any]:
    """Step until nothing is left to do; vLLM's last output of each call."""
    done: dict[str, Any] = {}
    for _ in range(most_steps):
        if not core_of(engine).scheduler.has_requests():
            return done
        done |= {output.request_id: output for output in engine.step() if output.finished}
    raise TimeoutError(f"still busy after {most_steps} steps: {report(engine)['requests']}")


def answer_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def at_most(running: int) -> dict[str, Any]:
    """The command that limits running requests, in order of arrival."""
    return {"admission": {"order": "arrival", "ageing_s": 30.0, "max_running": running}}


def random_command(rng: random.Random, budget_blocks: int) -> dict[str, Any]:
    """Moves every lever but the reserve."""
    return {
        "offload_target_blocks": rng.randrange(budget_blocks),
        "multiplier": rng.choice([1.0, 1.5, 2.0, 3.0, 4.0]),
        "watermark": rng.choice([0, 50, 200, "default"]),
        "admission": {
            "order": rng.choice(["arrival", "held-prefix-first"]),
            "ageing_s": 0.001,
            "max_running": rng.choice([2, 6, 12]),
        },
    }


@dataclass
class Conversation:
    """One session: its prompt grows by its answers and by fixed new text."""

    name: str
    turns: list[list[int]]
    answer_tokens: int
    prompt: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)


def make_conversations(
    count: int, turns: int, first: int, later: int, answer: int, seed: int
) -> list[Conversation]:
    rng = random.Random(seed)
    conversations = []
    for index in range(count):
        sizes = [first + rng.randrange(first // 2)] + [
            later + rng.randrange(later) for _ in range(turns - 1)
        ]
        texts = [[rng.randrange(32, 127) for _ in range(size)] for size in sizes]
        conversations.append(Conversation(f"c{index}", texts, answer))
    return conversations


@dataclass
class Run:
    """Tokens of every answer, and what the engine reported on the way."""

    answers: dict[str, list[list[int]]]
    hit_tokens: int
    steps: int
    residency_seen: set[str]
    last_report: dict[str, Any]


def converse(
    engine: Any,
    conversations: list[Conversation],
    between_steps: Callable[[int], None] = lambda step: None,
    max_steps: int = 20_000,
) -> Run:
    """Run all conversations to their end, each turn sent when the last was answered."""
    open_requests: dict[str, Conversation] = {}
    hit_tokens = 0
    seen: set[str] = set()

    def send(conversation: Conversation) -> None:
        turn = len(conversation.answers)
        conversation.prompt = conversation.prompt + conversation.turns[turn]
        request_id = f"{conversation.name}-{turn}"
        open_requests[request_id] = conversation
        ask(engine, request_id, conversation.prompt, conversation.answer_tokens)

    for conversation in conversations:
        send(conversation)
    step = 0
    while open_requests:
        assert step < max_steps, f"stuck: {report(engine)}"
        between_steps(step)
        for output in engine.step():
            if not output.finished:
                continue
            conversation = open_requests.pop(output.request_id)
            answer = answer_of(output)
            hit_tokens += output.num_cached_tokens or 0
            conversation.answers.append(answer)
            conversation.prompt = conversation.prompt + answer
            if len(conversation.answers) < len(conversation.turns):
                send(conversation)
        requests = report(engine)["requests"]
        seen.update(name for name in ("full", "mixed", "none") if requests[name])
        step += 1
    return Run(
        answers={conversation.name: conversation.answers for conversation in conversations},
        hit_tokens=hit_tokens,
        steps=step,
        residency_seen=seen,
        last_report=report(engine),
    )
