"""A prefill node as docs/cuda.md shows it: `vllm serve` itself, without HiSparse, on a stand-in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import psutil
from serve_process import plain_environment, until
from standin_node import START_S, complete, on_stand_ins

from hisparsed.demo.node import free_port
from hisparsed.node.engine.shared_memory import SharedFile, mapped_by, remove_left

CARD_BYTES = 64 * 2**20


class StockPrefill:
    """``vllm serve`` of ``model``, ready to be asked. ``kill`` it: it keeps prefixes till then.

    ``folder`` must be there, and hold no other node.
    """

    def __init__(self, folder: Path, model: str, *, ranks: int = 1, drafts: int = 0) -> None:
        self.model = model
        self.port = free_port()
        self.side_channel = free_port()
        self._log = folder / "prefill.log"
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
        options: dict[str, object] = {
            "port": self.port,
            "host": "127.0.0.1",
            "max-model-len": 1024,
            "max-num-seqs": 4,
            "max-num-batched-tokens": 512,
            "kv-cache-dtype": "fp8_ds_mla",
            "load-format": "dummy",
            "kv-transfer-config": json.dumps(transfer),
            "tensor-parallel-size": ranks,
        }
        if drafts:
            speculative = {"method": "mtp", "num_speculative_tokens": drafts}
            options["speculative-config"] = json.dumps(speculative)
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        # What `vllm serve` runs; the command itself asks for a distribution of that name.
        serve = ["-m", "vllm.entrypoints.openai.api_server", "--model", model, "--enforce-eager"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *serve, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=plain_environment()
                | on_stand_ins(CARD_BYTES, folder)
                # vLLM alone: none of our plug-ins.
                | {"VLLM_PLUGINS": "standin_gpu", "VLLM_NO_USAGE_STATS": "1"}
                | {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
                | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel)},
            )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=300.0)

    def wait_until_ready(self) -> None:
        until("vLLM serves", self._is_ready, timeout_s=START_S)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.log_end()
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def log_end(self) -> str:
        return "\n".join(self._log.read_text("utf-8", errors="replace").splitlines()[-60:])

    def tokens(self, prompt: Iterable[int], count: int) -> list[int]:
        """What vLLM alone answers."""
        answer = complete(self.http, self.model, prompt, count)
        return list(answer["choices"][0]["token_ids"])

    def prefill(self, prompt: Iterable[int]) -> dict[str, Any]:
        """What the router takes from here to the decode node."""
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        answer = complete(self.http, self.model, prompt, 1, kv_transfer_params=asked)
        return dict(answer["kv_transfer_params"])

    def kill(self) -> None:
        """And remove its shared memory, which nothing else would."""
        self.http.close()
        shared: set[SharedFile] = set()
        if self.process.poll() is None:
            serving = psutil.Process(self.process.pid)
            for one in (serving, *serving.children(recursive=True)):
                shared |= mapped_by(one.pid)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(40.0)
        until("its shared memory is free", lambda: not _kept(shared))


def _kept(shared: set[SharedFile]) -> bool:
    """Whether some of it is still held, once the rest is removed."""
    remove_left(shared)
    return any(file.is_there() for file in shared)
