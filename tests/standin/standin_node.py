"""A CUDA node on cards that are not there: its documents, its start, what its workers did."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import serve_process
from serve_process import NodeFiles, ServeProcess, policy_document, until
from vllm_trees import INSTALLED, over_installed_libraries, versions

from hisparsed.control.status.document import EngineStatus
from hisparsed.engine.cuda.model_config import tiny_config
from hisparsed.engine.reference.model_folder import write_model_folder
from hisparsed.node.engine.shared_memory import SharedMemoryRecord
from hisparsed.policy.signals import Snapshot

LONG = 620
"""Tokens of a prompt: ten blocks of it on the GPU, five times top-k."""
ANSWER = 8
CARD_BYTES = 19 * 2**20
"""106 GPU blocks: room for one long call whole, not for three."""
SHM = Path("/dev/shm")  # noqa: S108 (the kernel's, not a temporary file)
ROOT = Path(__file__).parents[2]
SITE = Path(__file__).parent / "site"
MISSING = Path(__file__).parent / "missing"
"""Packages that the installed vLLM does not need and a newer one does."""
START_S = 900.0
"""Four processes import vLLM, perhaps on two slow cores."""
MODEL = {
    **tiny_config(layers=6, index_topk=128),
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "index_n_heads": 4,
    "first_k_dense_replace": 7,
}
"""GLM-5.x in miniature: head sizes, KV rows and index sharing are real, all else is small."""


def cuda_files(
    folder: Path, *, kernels: str = "hisparsed", ranks: int = 2, drafts: int = 0, **changes: Any
) -> NodeFiles:
    """The shipped profile of eight H200, scaled to what a small machine holds."""
    model = write_model_folder(folder / "model", MODEL)
    files = NodeFiles(
        folder,
        node="cuda",
        model=str(model),
        host_budget="24MiB",
        cuda={
            "tensor_parallel_size": ranks,
            "max_model_len": 1024,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 512,
            "gpu_memory_utilization": 0.9,
            "kernels": kernels,
            "speculative_tokens": drafts,
        },
        engine_args={"enforce_eager": True, "load_format": "dummy"},
        **changes,
    )
    del files.document["reference"]
    files.write_config()
    files.write_policy(policy_document(levers={"multiplier": {"mode": "act"}}))
    return files


def on_stand_ins(card_bytes: int, folder: Path) -> dict[str, str]:
    """The environment in which vLLM finds the cards; ``card_bytes``: memory of each.

    ``STANDIN_VLLM`` names another vLLM than the installed one; links to its sources go to
    ``folder``.
    """
    path = [str(ROOT), str(SITE)]
    version = os.environ.get("STANDIN_VLLM", INSTALLED)
    if version != INSTALLED:
        if version not in versions():
            pytest.skip(f"the sources of vLLM {version} are not there")
        links = folder / "sources"
        links.mkdir()
        path = [str(over_installed_libraries(version, links)), *path, str(MISSING)]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "STANDIN_GPU_BYTES": str(card_bytes),
        "OMP_NUM_THREADS": "1",
        # Before anything imports Triton, whose own functions are made for one or the other.
        "TRITON_INTERPRET": "1",
    }


class CudaNode(ServeProcess):
    """``card_bytes``: memory of each card."""

    def __init__(
        self,
        files: NodeFiles,
        *,
        card_bytes: int,
        program: Sequence[str] = ("-m", "hisparsed"),
        **environment: str,
    ) -> None:
        self.evidence = files.folder / "evidence"
        self.evidence.mkdir(exist_ok=True)
        super().__init__(
            files,
            program=program,
            **on_stand_ins(card_bytes, files.folder),
            STANDIN_EVIDENCE=str(self.evidence),
            **environment,
        )
        self.http.timeout = httpx.Timeout(300.0)

    def kill(self) -> None:
        """And remove its shared memory, as the next start on its folder would."""
        super().kill()
        SharedMemoryRecord(self.files.state_dir).remove()

    def wait_until_ready(self) -> ServeProcess:
        serve_process.START_S = START_S
        return super().wait_until_ready()

    def observed(self) -> Snapshot:
        found = self.status().observed
        assert found is not None
        return found

    def life(self) -> EngineStatus:
        found = self.status().engine
        assert found is not None
        return found

    def serves_again(self, restarts: int) -> EngineStatus:
        """Once more engines have served than ``restarts``."""
        until(
            "another engine serves",
            lambda: self.life().state == "serving" and self.life().restarts_total > restarts,
            timeout_s=START_S,
        )
        return self.life()

    def rank(self, number: int) -> psutil.Process:
        """The worker process of a rank."""
        (found,) = (one for one in self.children() if f"Worker_TP{number}" in one.name())
        return found

    def leftovers(self) -> list[Path]:
        """Shared memory of this node's engines that is still there, live ones' too."""
        named = {name for one in self.workers() for name in one.get("regions", ())}
        return [path for path in (SHM / name for name in sorted(named)) if path.exists()]

    def counter(self, name: str) -> float:
        """One of vLLM's."""
        page = self.http.get("/metrics").text
        (found,) = re.findall(rf"^vllm:{name}_total\{{.*\}} (.+)$", page, re.MULTILINE)
        return float(found)

    def external_hits(self) -> float:
        """Prompt tokens whose indexer KV came back from the offload pool, or another node."""
        return self.counter("external_prefix_cache_hits")

    def workers(self) -> list[dict[str, Any]]:
        """What each worker process did, dead ones too."""
        found = [json.loads(path.read_text()) for path in sorted(self.evidence.glob("*.json"))]
        return [one for one in found if one.get("role") == "worker"]

    def spawned(self) -> list[bool]:
        """Of each worker: whether it began as a program of its own, not as a copy of the daemon."""
        return [any("spawn_main" in word for word in one["began_with"]) for one in self.workers()]

    def keep_evidence(self) -> None:
        """Copy it to where ``STANDIN_CALLS`` says, for `worker_table.py`."""
        folder = os.environ.get("STANDIN_CALLS")
        if folder:
            shutil.copytree(self.evidence, folder, dirs_exist_ok=True)

    def tokens(self, prompt: Iterable[int], count: int, **more: Any) -> list[int]:
        """Greedy."""
        answer = complete(self.http, str(self.files.document["model"]), prompt, count, **more)
        return list(answer["choices"][0]["token_ids"])

    def together(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.tokens(prompt, count), prompts))

    def operate(self, path: str, **body: Any) -> Any:
        """One change through the control API."""
        with self.control_http() as control:
            answer = control.post(path, json={"actor": "test", **body})
        assert answer.status_code == 200, answer.text
        return answer.json()


def complete(http: httpx.Client, model: str, prompt: Iterable[int], count: int, **more: Any) -> Any:
    """The answer to a greedy call."""
    answer = http.post(
        "/v1/completions",
        json={
            "model": model,
            "prompt": list(prompt),
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        },
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompts(first: int, count: int = 3) -> list[list[int]]:
    """Prompts that share no block."""
    return [
        [(7 * at * (one + 3) + one) % 250 for at in range(LONG)]
        for one in range(first, first + count)
    ]
