"""A prefill and a decode engine in this process, with a router's part between them.

Real sockets on the loopback address and real fetch threads; the engines are stepped in turn,
so what a test sees between two steps is a state that vLLM was in. A relay between them can do one
thing wrong, at one byte of the answer, so that a failure can be put at any stage of a transfer.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from conversations import EngineShape, ask, build_engine, core_of, report

from hisparsed.engine.reference.handoff.worker import HandoffOptions, HandoffWorker

Fault = Literal["cut", "flip", "stall"]


class FaultyRelay:
    """Relays to ``port``. The byte ``at`` of the first answer is lost, changed, or never comes."""

    def __init__(self, port: int, fault: Fault, at: int) -> None:
        self._target = port
        self._fault: Fault | None = fault
        self._at = at
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *raised: object) -> None:
        for sock in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                reader, _ = self._listener.accept()
            except OSError:
                return
            node = socket.create_connection(("127.0.0.1", self._target))
            self._open += [reader, node]
            fault, self._fault = self._fault, None
            for source, sink, wrong in ((reader, node, None), (node, reader, fault)):
                thread = threading.Thread(
                    target=self._relay, args=(source, sink, wrong), daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _relay(self, source: socket.socket, sink: socket.socket, fault: Fault | None) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                here = self._at - passed
                if fault is not None and here < len(data):
                    if fault == "flip":
                        data = data[:here] + bytes([data[here] ^ 1]) + data[here + 1 :]
                        fault = None
                    else:
                        sink.sendall(data[:here])
                        if fault == "cut":
                            break
                        while source.recv(4096):
                            """The rest is swallowed until an end gives up."""
                        return
                sink.sendall(data)
                passed += len(data)
            for sock in (source, sink):
                sock.shutdown(socket.SHUT_RDWR)


PREFILL = HandoffOptions(produces=True, consumes=False)
DECODE = HandoffOptions(produces=False, consumes=True)
PATIENCE_S = 60.0

ASK = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
"""The fields that a router sends with the call to the prefill node."""


@dataclass
class Answer:
    tokens: list[int]
    params: dict[str, Any] | None
    cached: int
    residency: set[str]
    """What the node reported of its running requests while this one was open."""


class Node:
    """One engine and what it counted."""

    def __init__(self, folder: Path, shape: EngineShape) -> None:
        self.engine = build_engine(folder, shape)
        self.counts: dict[str, int] = {}
        scheduler = self.connector._scheduler
        take = scheduler.take_counts

        def watched() -> dict[str, int]:
            counts = take()
            for name, count in counts.items():
                self.counts[name] = self.counts.get(name, 0) + count
            return counts

        scheduler.take_counts = watched

    @property
    def scheduler(self) -> Any:
        return core_of(self.engine).scheduler

    @property
    def connector(self) -> Any:
        return self.scheduler.connector.sub_connectors[1]

    @property
    def worker(self) -> HandoffWorker:
        worker: HandoffWorker = core_of(self.engine).model_executor._connectors._handoff.worker
        return worker

    def send(
        self, name: str, prompt: list[int], answer_tokens: int, params: dict[str, Any] | None
    ) -> None:
        extra = None if params is None else {"kv_transfer_params": dict(params)}
        ask(self.engine, name, prompt, answer_tokens, extra_args=extra)

    def blocks_in_use(self) -> tuple[int, int]:
        """GPU blocks and host blocks in use; lent blocks do not count."""
        gpu = self.scheduler.kv_cache_manager.block_pool
        host = self.scheduler.hisparsed.host.pool
        return (
            gpu.num_gpu_blocks - 1 - gpu.get_num_free_blocks(),
            host.referenced_blocks - host.held_blocks,
        )

    def close(self) -> None:
        core_of(self.engine).model_executor.shutdown()


class Pair:
    """``between_steps`` is called with the number of steps so far."""

    def __init__(
        self, prefill: Node, decode: Node, between_steps: Callable[[int], None] = lambda step: None
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.between_steps = between_steps
        self.steps = 0

    def step(self) -> list[Any]:
        self.between_steps(self.steps)
        self.steps += 1
        return [*self.prefill.engine.step(), *self.decode.engine.step()]

    def run(self, node: Node, calls: dict[str, Any]) -> dict[str, Answer]:
        """Step both until all of ``calls``, sent to ``node`` before, are answered."""
        open_calls = set(calls)
        answers: dict[str, Answer] = {}
        seen: set[str] = set()
        for _ in self.while_patient(f"{sorted(open_calls)} end"):
            for output in self.step():
                if output.finished and output.request_id in open_calls:
                    open_calls.discard(output.request_id)
                    answers[output.request_id] = Answer(
                        list(output.outputs[0].token_ids),
                        output.kv_transfer_params,
                        output.num_cached_tokens or 0,
                        seen,
                    )
            requests = report(node.engine)["requests"]
            seen.update(name for name in ("full", "mixed", "none") if requests[name])
            if not open_calls:
                return answers
        raise AssertionError("unreachable")

    def until(self, what: str, true: Callable[[], bool]) -> None:
        """Step both until something holds."""
        for _ in self.while_patient(what):
            if true():
                return
            self.step()

    def while_patient(self, what: str) -> Iterator[None]:
        ends_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends_s:
            yield
        states = [report(node.engine)["requests"] for node in (self.prefill, self.decode)]
        raise TimeoutError(f"not within {PATIENCE_S:g} s: {what}; prefill and decode: {states}")

    def prefilled(self, prompts: dict[str, list[int]]) -> dict[str, dict[str, Any]]:
        """What the prefill node answers for each prompt, as a router reads it."""
        for name, prompt in prompts.items():
            self.prefill.send(f"p-{name}", prompt, 1, ASK)
        answers = self.run(self.prefill, {f"p-{name}": None for name in prompts})
        return {name: answers[f"p-{name}"].params or {} for name in prompts}

    def decoded(
        self,
        prompts: dict[str, list[int]],
        params: dict[str, dict[str, Any]],
        answer_tokens: int,
    ) -> dict[str, Answer]:
        for name, prompt in prompts.items():
            self.decode.send(name, prompt, answer_tokens, params.get(name))
        return self.run(self.decode, dict(prompts))

    def handed_over(self, prompts: dict[str, list[int]], answer_tokens: int) -> dict[str, Answer]:
        return self.decoded(prompts, self.prefilled(prompts), answer_tokens)


@contextmanager
def pair(
    folder: Path,
    prefill: EngineShape,
    decode: EngineShape,
    prefill_options: HandoffOptions = PREFILL,
    decode_options: HandoffOptions = DECODE,
) -> Iterator[Pair]:
    nodes: list[Node] = []
    try:
        for shape, options in ((prefill, prefill_options), (decode, decode_options)):
            nodes.append(Node(folder, replace(shape, handoff=options)))
        yield Pair(*nodes)
    finally:
        for node in nodes:
            node.close()
