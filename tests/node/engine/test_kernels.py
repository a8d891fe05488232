"""Kernels as a node keeps them: settled before each start, doubted after errors."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hisparsed.config.node import NodeConfig
from hisparsed.control.status.document import CanaryState, CanaryStatus
from hisparsed.engine.cuda.checks import GpuFacts, MachineFacts
from hisparsed.engine.cuda.model_config import tiny_config
from hisparsed.engine.cuda.proof import choose
from hisparsed.engine.cuda.proof.choose import Around, Cards
from hisparsed.engine.cuda.proof.question import ChunkProof, HotProof, Proof, Question, Timing
from hisparsed.engine.kernel_choice import KernelReason
from hisparsed.errors import UserError
from hisparsed.logs.ring import LogLine
from hisparsed.node.engine.kernels import KernelKeeper, Settled, kernel_error
from hisparsed.node.engine.start import StoppedWhileStarting, _settle
from hisparsed.node.engine.values import EngineValues
from hisparsed.policy.events import EventKind

CARD = MachineFacts(2**40, 2**40, (GpuFacts(2**37, (9, 0)),))


class Events:
    def __init__(self) -> None:
        self.told: list[tuple[EventKind, str]] = []

    def event(self, kind: EventKind, sentence: str) -> None:
        self.told.append((kind, sentence))


class Keeper(KernelKeeper):
    """A keeper of one GPU that answers what ``proof`` says; ``canary_state`` can be set."""

    def __init__(self, folder: Path, **proof: Any) -> None:
        self.events = Events()
        self.canary_state = CanaryState.OK
        self.proof = proof
        self.proofs = 0
        self.now_s = 100.0
        super().__init__(
            folder,
            self.events,  # type: ignore[arg-type]
            lambda: CanaryStatus(state=self.canary_state, sentence="token 3 differs"),
            wall_clock=lambda: self.now_s,
            around=Around(
                cards=lambda ranks: Cards(("H200 GPU-0",), "580"),
                machine=lambda: CARD,
                prove=self._prove,
                wall_clock=lambda: self.now_s,
            ),
        )

    async def _prove(self, questions: Sequence[Question]) -> tuple[Proof, ...]:
        self.proofs += 1
        if isinstance(self.proof.get("trouble"), Exception):
            raise self.proof["trouble"]
        times = Timing(requests=1, ours_us=self.proof.get("ours_us", 50.0), vllm_us=100.0)
        return tuple(
            Proof(
                device=one.device,
                hot=None if one.hot is None else HotProof(rows=1, timings=(times,)),
                chunks=ChunkProof(chunks=1, difference=self.proof.get("chunk")),
            )
            for one in questions
        )

    @property
    def kinds(self) -> list[EventKind]:
        return [kind for kind, _ in self.events.told]

    def tick(self) -> None:
        self.watch(None)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def vllm_that_takes_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "installed_vllm", lambda: "0.33.0")


def values(folder: Path, kernels: str = "auto") -> EngineValues:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(tiny_config()))
    document = {"node": "cuda", "model": str(model), "host_budget": "1GiB"}
    config = NodeConfig.model_validate({**document, "cuda": {"kernels": kernels}})
    return EngineValues(config, 2.0, 4.0 if kernels == "auto" else None)


async def test_proved_kernels_are_started_with_the_largest_hot_buffers(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    settled = await keeper.settle(values(tmp_path))
    assert settled.values.config.cuda.kernels == "hisparsed"
    assert settled.values.max_multiplier == 4.0
    assert settled.lends
    assert keeper.kinds == [EventKind.KERNELS_PROVED]
    status = keeper.status()
    assert status is not None
    assert status.reason is KernelReason.PROVED


async def test_slow_kernels_leave_vllms_with_the_policys_start(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path, ours_us=150.0)
    settled = await keeper.settle(values(tmp_path))
    assert settled.values.config.cuda.kernels == "vllm"
    assert settled.values.max_multiplier == 2.0
    ((kind, sentence),) = keeper.events.told
    assert kind is EventKind.KERNELS_FELL_BACK
    assert "hisparsed's kernels take 1.50 of vLLM's time" in sentence


async def test_named_kernels_are_left_as_they_are_and_announce_nothing(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    asked = values(tmp_path, "vllm")
    settled = await keeper.settle(asked)
    assert settled.values == asked
    assert keeper.kinds == []


async def test_copies_that_came_back_wrong_lend_nothing(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path, chunk="chunk 7")
    settled = await keeper.settle(values(tmp_path))
    assert not settled.lends
    assert settled.values.config.cuda.kernels == "hisparsed", "the two are judged apart"
    assert keeper.kinds == [EventKind.KERNELS_PROVED, EventKind.OFFLOAD_UNPROVED]
    assert "chunk 7" in keeper.events.told[1][1]


async def test_a_mistake_in_the_daemon_trusts_nothing_and_starts_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = Keeper(tmp_path, trouble=ZeroDivisionError("0"))
    settled = await keeper.settle(values(tmp_path))
    assert (settled.values.config.cuda.kernels, settled.lends) == ("vllm", False)
    assert "copies are not used" in caplog.text


async def test_what_the_start_would_refuse_is_refused(tmp_path: Path) -> None:
    asked = values(tmp_path)
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(UserError, match="config"):
        await Keeper(tmp_path).settle(asked)


async def test_a_canary_that_answers_otherwise_ends_the_trust_once(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    await keeper.settle(values(tmp_path))
    keeper.tick()
    assert len(keeper.kinds) == 1
    keeper.canary_state = CanaryState.MISMATCH
    keeper.tick()
    keeper.tick()
    assert keeper.kinds == [EventKind.KERNELS_PROVED, EventKind.KERNELS_FELL_BACK]
    assert "token 3 differs" in keeper.events.told[1][1]
    status = keeper.status()
    assert status is not None
    assert (status.used, status.reason) == ("hisparsed", KernelReason.DISTRUSTED)
    settled = await keeper.settle(values(tmp_path))
    assert settled.values.config.cuda.kernels == "vllm"
    assert keeper.proofs == 1
    assert "the canary gave a different answer" in keeper.events.told[2][1]
    again = await Keeper(tmp_path).settle(values(tmp_path))
    assert again.values.config.cuda.kernels == "vllm", "the next daemon knows it too"


@pytest.mark.parametrize("kernels", ["vllm", "hisparsed"])
async def test_named_kernels_are_not_doubted(tmp_path: Path, kernels: str) -> None:
    keeper = Keeper(tmp_path)
    await keeper.settle(values(tmp_path, kernels))
    keeper.canary_state = CanaryState.MISMATCH
    keeper.tick()
    keeper.engine_ended([line("CUDA error: an illegal memory access was encountered")])
    assert keeper.kinds == []


async def test_an_error_of_a_kernel_ends_the_trust(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    await keeper.settle(values(tmp_path))
    keeper.engine_ended([line("CUDA error: an illegal memory access", at_unix_s=99.0)])
    assert len(keeper.kinds) == 1, "that was the engine before"
    keeper.engine_ended([line("the engine core has died")])
    assert len(keeper.kinds) == 1
    keeper.engine_ended([line("RuntimeError: hot buffers are in doubt: 3 rows had no place")])
    assert "hot buffers are in doubt: 3 rows had no place" in keeper.events.told[1][1]
    settled = await keeper.settle(values(tmp_path))
    assert settled.values.config.cuda.kernels == "vllm"


def line(text: str, *, at_unix_s: float = 150.0, source: Any = "engine") -> LogLine:
    return LogLine(
        sequence=1, at_unix_s=at_unix_s, source=source, level=40, logger="vllm", text=text
    )


@pytest.mark.parametrize(
    ("text", "is_ours"),
    [
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", True),
        ("CUDA error: misaligned address", True),
        ("RuntimeError: Triton Error [CUDA]: out of resource", True),
        ("ValueError: state row 1: capacity 128 needs 2 hot blocks, the hot table names 1", True),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", False),
        ("CUDA error: uncorrectable ECC error encountered", False),
        ("NCCL error: unhandled system error", False),
    ],
)
def test_errors_of_kernels_are_told_from_others(text: str, is_ours: bool) -> None:
    assert (kernel_error([line(text)], 100.0) is not None) is is_ours
    assert kernel_error([line(text, source="daemon")], 100.0) is None


def test_choosing_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, hisparsed.node.engine.kernels\n"
        "print([name for name in ('torch', 'vllm') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"


async def test_a_stop_ends_a_proof_that_goes_on(tmp_path: Path) -> None:
    stop, ended = asyncio.Event(), asyncio.Event()

    async def settle(_values: EngineValues) -> Settled:
        stop.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError("nobody sets that event")

    node: Any = SimpleNamespace(kernels=SimpleNamespace(settle=settle))
    with pytest.raises(StoppedWhileStarting):
        await _settle(node, values(tmp_path), stop)
    assert ended.is_set()


async def test_nodes_without_kernels_to_choose_take_the_values_as_they_are(tmp_path: Path) -> None:
    node: Any = SimpleNamespace(kernels=None)
    asked = values(tmp_path)
    assert await _settle(node, asked, asyncio.Event()) == Settled(asked)
