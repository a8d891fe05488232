"""Whose kernels an engine is started with: what is asked, kept, used instead, and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from eight_h200 import GLM_CONFIG

from hisparsed.config.node import NodeConfig
from hisparsed.engine.cuda.checks import GpuFacts, MachineFacts
from hisparsed.engine.cuda.nvml import GpuReading
from hisparsed.engine.cuda.proof import choose
from hisparsed.engine.cuda.proof.choose import Around, Cards, choose_kernels, with_kernels
from hisparsed.engine.cuda.proof.kept import FILE_NAME, KeptProofs
from hisparsed.engine.cuda.proof.question import ChunkProof, HotProof, Proof, Question, Timing
from hisparsed.engine.kernel_choice import KernelReason, KernelsStatus
from hisparsed.errors import UserError

GIB = 2**30
MACHINE = MachineFacts(2000 * GIB, 1000 * GIB, (GpuFacts(141 * GIB, (9, 0)),) * 2)
START, MOST = 5.0, 10.0
"""Of the shipped policy with three drafts, in top-k."""


class Node:
    """A node of two GPUs; ``ours_us`` and what else its GPUs would answer can be set."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(GLM_CONFIG))
        self.cuda: dict[str, Any] = {"tensor_parallel_size": 2, "speculative_tokens": 3}
        self.driver = "580.1"
        self.ours_us = 90.0
        self.hot: dict[str, Any] = {}
        self.chunks: dict[str, Any] = {}
        self.asked: list[Question] = []
        self.now_s = 1000.0

    def config(self) -> NodeConfig:
        document = {"node": "cuda", "model": str(self.folder / "model"), "host_budget": "512GiB"}
        return NodeConfig.model_validate({**document, "cuda": self.cuda})

    async def prove(self, questions: Sequence[Question]) -> tuple[Proof, ...]:
        self.asked += questions
        return tuple(self._answer(one) for one in questions)

    def _answer(self, question: Question) -> Proof:
        times = Timing(requests=64, ours_us=self.ours_us, vllm_us=100.0)
        hot = HotProof(rows=10, timings=(times,)).model_copy(update=self.hot)
        return Proof(
            device=question.device,
            hot=None if question.hot is None else hot,
            chunks=ChunkProof(chunks=9).model_copy(update=self.chunks),
        )

    @property
    def kept(self) -> KeptProofs:
        """As a new daemon reads it."""
        return KeptProofs(self.folder)

    async def choose(self, *, most: float = MOST) -> KernelsStatus:
        """What the next start takes; what was asked before it is forgotten."""
        self.asked.clear()
        around = Around(
            cards=lambda ranks: Cards(
                tuple(f"H200 GPU-{one}" for one in range(ranks)), self.driver
            ),
            machine=lambda: MACHINE,
            prove=self.prove,
            wall_clock=lambda: self.now_s,
        )
        return await choose_kernels(
            self.config(), self.kept, start_multiplier=START, most_multiplier=most, around=around
        )


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(choose, "installed_vllm", lambda: "0.33.0")
    return Node(tmp_path)


async def test_auto_takes_ours_where_every_gpu_proves_them(node: Node) -> None:
    status = await node.choose()
    assert (status.asked, status.used, status.reason) == ("auto", "hisparsed", KernelReason.PROVED)
    assert status.ratio == pytest.approx(0.9)
    assert [one.device for one in node.asked] == [0, 1]
    hot, chunks = node.asked[0].hot, node.asked[0].chunks
    assert hot is not None
    assert (hot.topk, hot.query_len, hot.row_bytes, hot.layers) == (2048, 4, 656, 4)
    assert (hot.start_rows, hot.most_rows) == (10_240, 20_480)
    assert (chunks.layers, chunks.pages, chunks.page_bytes) == (79, 22, 64 * 132)


async def test_an_answer_is_kept_for_the_same_node(node: Node) -> None:
    await node.choose()
    node.now_s = 2000.0
    again = await node.choose()
    assert node.asked == []
    assert (again.reason, again.proved_unix_s) == (KernelReason.PROVED, 1000.0)
    assert (node.folder / FILE_NAME).stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    "changes",
    [
        {"driver": "581.0"},
        {"cuda": {"tensor_parallel_size": 1, "speculative_tokens": 3}},
        {"cuda": {"tensor_parallel_size": 2, "speculative_tokens": 2}},
        {"cuda": {"tensor_parallel_size": 2, "kv_cache_dtype": "bfloat16"}},
    ],
    ids=["driver", "gpus", "drafts", "rows"],
)
async def test_what_an_answer_rests_on_is_asked_again_when_it_changes(
    node: Node, changes: dict[str, Any]
) -> None:
    await node.choose()
    vars(node).update(changes)
    await node.choose()
    assert node.asked


async def test_other_kernels_or_versions_are_asked_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.choose()
    monkeypatch.setattr(choose, "versions", lambda: {"kernels": "other"})
    await node.choose()
    assert node.asked


@pytest.mark.parametrize(
    ("changes", "reason", "says"),
    [
        (
            {"ours_us": 126.0},
            KernelReason.SLOWER,
            "hisparsed's kernels take 1.26 of vLLM's time, over 1.25",
        ),
        (
            {"hot": {"difference": "row 3"}},
            KernelReason.DIFFERENT,
            "hisparsed's kernels read wrong rows: row 3",
        ),
        ({"hot": {"error": "it hangs"}}, KernelReason.UNPROVED, "did not finish: it hangs"),
    ],
)
async def test_auto_falls_back_to_vllms_and_says_why(
    node: Node, changes: dict[str, Any], reason: KernelReason, says: str
) -> None:
    vars(node).update(changes)
    status = await node.choose()
    assert (status.used, status.reason) == ("vllm", reason)
    assert status.reason.fell_back
    assert says in status.sentence
    assert status.offload_trusted


async def test_the_allowed_ratio_is_the_documents(node: Node) -> None:
    node.cuda["kernels_max_ratio"] = 0.85
    assert (await node.choose()).reason is KernelReason.SLOWER
    node.cuda["kernels_max_ratio"] = 0.9
    status = await node.choose()
    assert (status.reason, node.asked) == (KernelReason.PROVED, []), "times are kept, not verdicts"


@pytest.mark.parametrize("ratio", [0.09, 10.1])
def test_a_ratio_that_cannot_be_meant_is_refused(node: Node, ratio: float) -> None:
    node.cuda["kernels_max_ratio"] = ratio
    with pytest.raises(ValueError, match="kernels_max_ratio"):
        node.config()


async def test_what_came_to_nothing_is_asked_again(node: Node) -> None:
    node.hot = {"error": "no memory"}
    await node.choose()
    node.hot = {}
    status = await node.choose()
    assert len(node.asked) == 2
    assert status.used == "hisparsed"


async def test_a_doubt_outlives_the_daemon_and_ends_with_what_it_rests_on(node: Node) -> None:
    await node.choose()
    node.kept.put_doubt("the canary gave a different answer", 1500.0)
    status = await node.choose()
    assert (status.used, status.reason) == ("vllm", KernelReason.DISTRUSTED)
    assert "the canary gave a different answer" in status.sentence
    assert FILE_NAME in status.sentence, "how to have them proved again"
    node.driver = "581.0"
    assert (await node.choose()).used == "hisparsed"


@pytest.mark.parametrize("kernels", ["vllm", "hisparsed"])
async def test_what_the_document_names_is_used_and_copies_are_proved(
    node: Node, kernels: str
) -> None:
    node.cuda["kernels"] = kernels
    status = await node.choose()
    assert (status.used, status.reason) == (kernels, KernelReason.CONFIGURED)
    assert all(one.hot is None for one in node.asked)
    assert len(node.asked) == 2


async def test_an_answer_for_auto_serves_named_kernels_too(node: Node) -> None:
    await node.choose()
    node.cuda["kernels"] = "vllm"
    await node.choose()
    assert node.asked == []


@pytest.mark.parametrize("kernels", ["auto", "vllm"])
async def test_copies_that_fail_are_not_used_whoevers_kernels_run(node: Node, kernels: str) -> None:
    node.cuda["kernels"] = kernels
    node.chunks = {"difference": "chunk 7"}
    status = await node.choose()
    assert not status.offload_trusted
    assert "on GPU 0 wrong bytes came back: chunk 7" in status.offload_sentence
    assert status.used == ("hisparsed" if kernels == "auto" else "vllm")


async def test_what_cannot_run_ours_is_not_asked_for_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = await node.choose(most=20.0)
    assert (status.used, status.reason) == ("vllm", KernelReason.NOT_POSSIBLE)
    assert "hot.max of the policy: 40960 rows are more than vLLM's kernels" in status.sentence
    assert all(one.hot is None for one in node.asked)
    monkeypatch.setattr(choose, "installed_vllm", lambda: "0.30.0")
    status = await node.choose()
    assert status.reason is KernelReason.NOT_POSSIBLE
    assert "needs vLLM 0.31" in status.sentence


async def test_a_damaged_file_costs_a_proof(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    (node.folder / FILE_NAME).write_text("{")
    assert (await node.choose()).used == "hisparsed"
    assert len(node.asked) == 2
    assert "cannot be read" in caplog.text


async def test_a_model_that_is_not_there_is_the_starts_to_refuse(node: Node) -> None:
    (node.folder / "model" / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json"):
        await node.choose()


def test_deciding_changes_nothing_else(node: Node) -> None:
    decided = with_kernels(node.config(), "hisparsed")
    assert decided.cuda.kernels == "hisparsed"
    assert with_kernels(decided, "auto") == node.config()


def test_cards_are_those_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [GpuReading(one, name="H200", uuid=f"GPU-{one}") for one in range(3)]
    reader = type(
        "Reader",
        (),
        {"read": lambda _: gpus, "driver": lambda _: "580", "close": lambda _: None},
    )
    monkeypatch.setattr(choose, "GpuReader", lambda *_, **__: reader())
    assert choose.read_cards(2) == Cards(("H200 GPU-0", "H200 GPU-1"), "580")
