"""An engine without a model: tokens count up from the prompt's length, a token a step and call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_origin

from pydantic import BaseModel

from hisparsed.engine.messages import (
    ApplyResult,
    EngineCommand,
    EngineReport,
    GeometryReport,
    HostReport,
    HotReport,
    LedgerViolation,
    RequestsReport,
)
from hisparsed.soak.engine import Answer

GEOMETRY: dict[str, Any] = {
    "block_tokens": 16,
    "host_block_bytes": 8192,
    "chunk_tokens": 16,
    "chunk_bytes": 2048,
    "chunks_per_host_block": 4,
    "offload_copies": 1,
    "budget_blocks": 1000,
    "floor_blocks": 66,
    "max_model_len": 1024,
    "topk": 32,
    "decode_query_len": 1,
    "gpu_blocks": 321,
    "hot_groups": 1,
    "max_lease_blocks": 4,
    "max_num_seqs": 8,
    "row_bytes": 512,
}


class FakeEngine:
    """``deaf`` calls get no token; ``wrong`` ones get wrong tokens; ``broken`` is what a check
    finds, ``watched`` what reports say; ``leak`` blocks stay in use."""

    def __init__(self) -> None:
        self.open: dict[str, tuple[int, int, list[int]]] = {}
        self.commands: list[EngineCommand] = []
        self.resets = 0
        self.aborted: list[str] = []
        self.deaf: set[str] = set()
        self.wrong: set[str] = set()
        self.broken: list[str] = []
        self.watched: list[str] = []
        self.leak = 0
        self.steps = 0
        self.tokens = 0
        self.refusing = False

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> None:
        self.open[request_id] = (len(prompt), max_tokens, [])

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        del self.open[request_id]

    def step(self) -> list[Answer]:
        self.steps += 1
        found = []
        for name, (start, most, tokens) in list(self.open.items()):
            if name in self.deaf:
                continue
            self.tokens += 1
            tokens.append(start + len(tokens) + (name in self.wrong))
            if len(tokens) == most:
                del self.open[name]
            found.append(Answer(name, tuple(tokens), len(tokens) == most))
        return found

    def apply(self, command: EngineCommand) -> ApplyResult:
        if self.refusing:
            raise ValueError("levers are frozen")
        self.commands.append(command)
        return ApplyResult(
            offload_target_blocks=0,
            lent_blocks=0,
            multiplier=1.0,
            lease_blocks=1,
            transition_watermark=0,
            admission_order="arrival",
            max_running=8,
            apply_us=0.0,
        )

    def check(self) -> list[str]:
        return self.broken

    def reset_caches(self, *, running: bool, connector: bool) -> bool:
        self.resets += 1
        return True

    def report(self) -> EngineReport:
        geometry = GEOMETRY
        host = {"release": "possible", "hisparse_in_use_blocks": self.leak}
        return EngineReport(
            **required(EngineReport)
            | {
                "scheduled_tokens": self.tokens,
                "geometry": GeometryReport(**required(GeometryReport) | geometry),
                "host": HostReport(**required(HostReport) | host),
                "gpu_free_blocks": 320,
                "requests": RequestsReport(**required(RequestsReport)),
                "hot": HotReport(**required(HotReport)),
                "admission_order": "arrival",
                "violations": [
                    LedgerViolation(rule=rule, sentence="found by the watch")
                    for rule in self.watched
                ],
            }
        )


def required(model: type[BaseModel]) -> dict[str, Any]:
    """The least that a message can be made of: zero, or nothing in a list."""
    return {
        name: [] if get_origin(field.annotation) is list else 0
        for name, field in model.model_fields.items()
        if field.is_required()
    }
