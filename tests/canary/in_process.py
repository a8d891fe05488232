"""A canary's engine in this process, stepped by hand, and ways to harm exactly one row of it.

Harm goes to rows that vLLM's own tables name as the canary's: in the host pool, in a hot buffer,
in a chunk of the offload pool. Nothing of the code under test finds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conversations import control, core_of
from vllm.v1.kv_offload.base import make_offload_key

from hisparsed.canary.asker import positions_of, sampling_of
from hisparsed.canary.round import CanaryAnswer, CanaryQuestion
from hisparsed.engine.messages import CanaryReport
from hisparsed.engine.reference.model_folder import INDEX_ROW_BYTES


class InProcess:
    """``CanaryEngine`` over an in-process ``LLMEngine``.

    ``salt`` keeps its pages apart from those of others on the same engine. ``between`` is called
    with question and request before each step of an answer.
    """

    def __init__(self, engine: Any, salt: str) -> None:
        self.engine = engine
        self._salt = salt
        self.between: Callable[[CanaryQuestion, Any], None] = lambda question, request: None
        self.asked: list[CanaryQuestion] = []

    def tokens_of(self, text: str) -> list[int]:
        return list(text.encode())

    async def ask(self, question: CanaryQuestion) -> CanaryAnswer:
        core = core_of(self.engine)
        self.asked.append(question)
        name = f"canary-{self._salt}-0123456789abcdef-{len(self.asked)}"
        control(core, "canary-begin", {"request_id": name, "residency": question.residency})
        prompt = {"prompt_token_ids": list(question.prompt), "cache_salt": self._salt}
        self.engine.add_request(name, prompt, sampling_of(question))
        while True:
            for known, request in list(core.scheduler.requests.items()):
                if known.startswith(name):
                    self.between(question, request)
            for output in self.engine.step():
                if output.request_id == name and output.finished:
                    seen = control(core, "canary-end", {"request_id": name})
                    return CanaryAnswer(
                        positions_of(output),
                        int(output.num_cached_tokens or 0),
                        CanaryReport.model_validate(seen),
                    )


@dataclass(frozen=True)
class Found:
    """Where the canary's rows are: its host blocks and block hashes, and a position it selects."""

    host_blocks: tuple[int, ...]
    hashes: tuple[bytes, ...]
    position: int


class Saboteur:
    """Looks where a canary's rows are while it decodes from the host, and harms one of them."""

    def __init__(self, engine: Any) -> None:
        core = core_of(engine)
        control_side = core.scheduler.hisparsed
        self._host = control_side._coordinator.host_manager
        self._offload = control_side._offload
        executor = core.model_executor
        self._store, self._hot, self._tables = executor._store, executor._hot, executor._tables

    def look(self, request: Any) -> Found | None:
        """``None`` until the request reads from the host."""
        state = self._tables.requests.get(request.request_id)
        if state is None or request.num_output_tokens < 8:
            return None
        latest = self._latest_slot(state.row)
        if latest is None:
            return None
        held = self._host.req_to_blocks[request.request_id]
        position = int(self._hot._states[0].slot_pos[state.row, latest])
        return Found(tuple(block.block_id for block in held), tuple(request.block_hashes), position)

    def _latest_slot(self, row: int) -> int | None:
        """The slot of index group 0 that was selected last."""
        resolver = self._hot._states[0]
        stamps = resolver.slot_stamp[row]
        return int(stamps.argmax()) if int(stamps.max()) else None

    def harm_host_row(self, found: Found) -> None:
        """One row of one layer in the host pool."""
        block, offset = divmod(found.position, self._store.block_size)
        row = found.host_blocks[block] * self._store.block_size + offset
        self._store.host_rows[0][row] ^= 0x7F

    def harm_hot_row(self, request: Any) -> bool:
        """One row of one layer in the request's hot buffer; false while it holds none."""
        state = self._tables.requests.get(request.request_id)
        slot = None if state is None else self._latest_slot(state.row)
        if state is None or slot is None:
            return False
        block, offset = divmod(slot, self._store.block_size)
        leased = state.hot_blocks[0][block]
        row = self._store.layer_base[0] + leased * self._store.block_rows + offset
        self._store.rows[row] ^= 0x7F
        return True

    def harm_chunk_row(self, found: Found) -> None:
        """One indexer row of one index group in a lent block."""
        at, offset = divmod(found.position, self._store.block_size)
        chunk = self._offload._policy.get(make_offload_key(found.hashes[at], 1))
        block, slot = self._offload.layout.locate(int(chunk.chunk_id))
        first = offset * INDEX_ROW_BYTES
        for piece in self._offload.layout.pieces(slot):
            begin = max(first, piece.chunk_offset)
            end = min(first + INDEX_ROW_BYTES - 4, piece.chunk_offset + piece.length)
            if begin < end:
                start = piece.slice_offset + begin - piece.chunk_offset
                data = self._store.host_block_slices(block)[piece.layer]
                data[start : start + end - begin] ^= -1
