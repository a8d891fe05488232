"""An engine without a model: tokens count up from the prompt's length, one token per step and
call."""

from __future__ import annotations

from collections.abc import Sequence

from hisparsed.engine.messages import ApplyResult
from hisparsed.policy.decisions import EngineCommand
from hisparsed.policy.signals import (
    AdmissionOrder,
    AdmissionRules,
    EngineReport,
    GpuPool,
    HiSparsePool,
    HotBuffers,
    Ledger,
    LedgerViolation,
    LiveSet,
    OffloadPool,
    PoolGeometry,
    Progress,
    Requests,
    Reserve,
    Watermark,
)
from hisparsed.soak.engine import AnswerSoFar

GEOMETRY = PoolGeometry(
    block_tokens=16,
    host_block_bytes=8192,
    offload_chunk_tokens=16,
    offload_chunk_bytes=2048,
    chunks_per_host_block=4,
    offload_copies=1,
    budget_blocks=1000,
    max_model_len=1024,
    topk=32,
    decode_query_len=1,
    gpu_blocks_total=321,
    hot_block_rows=16,
    hot_groups=1,
    max_lease_blocks=4,
    max_num_seqs=8,
    row_bytes=512,
)


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

    def step(self) -> list[AnswerSoFar]:
        self.steps += 1
        found = []
        for name, (start, most, tokens) in list(self.open.items()):
            if name in self.deaf:
                continue
            self.tokens += 1
            tokens.append(start + len(tokens) + (name in self.wrong))
            if len(tokens) == most:
                del self.open[name]
            found.append(AnswerSoFar(name, tuple(tokens), len(tokens) == most))
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
            admission_order=AdmissionOrder.ARRIVAL,
            max_running=8,
            apply_us=0.0,
        )

    def check(self) -> list[str]:
        return self.broken

    def reset_caches(self, *, running: bool, connector: bool) -> bool:
        self.resets += 1
        return True

    def report(self) -> EngineReport:
        found = tuple(LedgerViolation(rule, "found by the watch") for rule in self.watched)
        return EngineReport(
            geometry=GEOMETRY,
            hisparse=HiSparsePool(1000, 1000, self.leak, 0, 1000 - self.leak),
            offload=OffloadPool(0, 0, 0, 0, 0),
            reserve=Reserve(can_release=True),
            pending_blocks=0,
            draining_blocks=0,
            head_need_blocks=0,
            gpu=GpuPool(321, 320, waiting_for_blocks=False),
            requests=Requests(0, 0, 0, 0, 0, 0, 0),
            hot=HotBuffers(0.0, 0, 0, 0, 0, 0),
            sessions=LiveSet(0, 0),
            admission=AdmissionRules(AdmissionOrder.ARRIVAL, 30.0, 8, None, 10.0),
            watermark=Watermark(0, False),
            progress=Progress(0, self.tokens),
            ledger=Ledger(found),
        )
