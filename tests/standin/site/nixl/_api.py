"""NIXL's agent as vLLM's NixlConnector calls it: memory of another process is read by the kernel.

Only READ, and only between ranges that were registered as the kind of memory that descriptors
name. A read begins when it is asked for and copies when its state is asked for the second time, so
who writes or frees too early shows. Notifications are datagrams.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from standin_gpu import compiled, evidence

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PTRACER = 0x59616D61
_ANY = ctypes.c_ulong(-1)
_LOCAL = "NIXL_INIT_AGENT"


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


@dataclass(frozen=True)
class Telemetry:
    """Microseconds, bytes and descriptors of one transfer."""

    totalBytes: int  # noqa: N815 (NIXL's names)
    descCount: int  # noqa: N815
    xferDuration: float = 1.0  # noqa: N815
    postDuration: float = 1.0  # noqa: N815


def nixl_agent_config(**options: Any) -> SimpleNamespace:
    return SimpleNamespace(**options)


@dataclass(frozen=True)
class _Descriptors:
    kind: str
    rows: Any
    """Address, bytes and device of each."""


@dataclass
class _Agent:
    """``ranges``: kind, first address and bytes of each."""

    name: str
    pid: int
    ranges: list[tuple[str, int, int]] = field(default_factory=list)

    def require_registered(self, descriptors: _Descriptors) -> None:
        for address, size, _ in descriptors.rows.tolist():
            if not any(
                kind == descriptors.kind and start <= address and address + size <= start + length
                for kind, start, length in self.ranges
            ):
                raise RuntimeError(f"{size} B at {address:#x} are no {descriptors.kind} registered")


@dataclass
class _Read:
    peer: _Agent
    to: Any
    source: Any
    kind: str
    notice: bytes | None
    asked: int = -1
    """How often its state was asked for; -1: not begun."""


class nixl_agent:  # noqa: N801 (NIXL's name)
    """One a worker. Handles are numbers."""

    def __init__(self, name: str, config: Any = None) -> None:
        # A kernel with Yama lets only parents look into a process that has not said otherwise.
        _LIBC.prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)
        self._own = _Agent(name, os.getpid())
        self._peers: dict[str, _Agent] = {}
        self._lists: dict[int, tuple[_Agent, _Descriptors]] = {}
        self._reads: dict[int, _Read] = {}
        self._handles = 0
        self._inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._inbox.setblocking(False)
        self._inbox.bind(_address(name))

    # --- memory ---------------------------------------------------------------------

    def get_reg_descs(self, ranges: list[tuple[int, int, int, str]], kind: str) -> Any:
        return [(kind, start, size) for start, size, _, _ in ranges]

    def register_memory(self, descriptors: Any, backends: Any = None) -> None:
        self._own.ranges += descriptors

    def deregister_memory(self, descriptors: Any) -> None:
        for one in descriptors:
            self._own.ranges.remove(one)

    def get_xfer_descs(self, rows: Any, kind: str) -> _Descriptors:
        return _Descriptors(kind, np.asarray(rows, dtype=np.uint64).reshape(-1, 3))

    def prep_xfer_dlist(
        self, agent: str, descriptors: _Descriptors | Any, mem_type: str | None = None
    ) -> int:
        """With ``mem_type``, as vLLM calls it since 0.33, ``descriptors`` are series."""
        if mem_type is not None:
            descriptors = _Descriptors(mem_type, _each(np.asarray(descriptors, dtype=np.uint64)))
        owner = self._own if agent == _LOCAL else self._peers[agent]
        owner.require_registered(descriptors)
        handle = self._next()
        self._lists[handle] = owner, descriptors
        return handle

    def release_dlist_handle(self, handle: int) -> None:
        del self._lists[handle]

    # --- agents ---------------------------------------------------------------------

    def get_agent_metadata(self) -> bytes:
        return json.dumps([self._own.name, self._own.pid, self._own.ranges]).encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        name, pid, ranges = json.loads(metadata)
        self._peers[name] = _Agent(name, pid, [tuple(one) for one in ranges])
        return str(name)

    def remove_remote_agent(self, name: str) -> None:
        del self._peers[name]

    def check_remote_metadata(self, name: str) -> bool:
        return name in self._peers

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.sendto(f"{self._own.name}\n".encode() + notif_msg, _address(agent))

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        found: dict[str, list[bytes]] = {}
        while True:
            try:
                sender, _, message = self._inbox.recv(1 << 16).partition(b"\n")
            except BlockingIOError:
                return found
            found.setdefault(sender.decode(), []).append(message)

    # --- transfers ------------------------------------------------------------------

    def make_prepped_xfer(
        self,
        operation: str,
        local: int,
        local_ids: Any,
        remote: int,
        remote_ids: Any,
        notif_msg: bytes | None = None,
    ) -> int:
        if operation != "READ":
            raise NotImplementedError(f"the stand-in reads only, and does not {operation}")
        (_, near), (peer, far) = self._lists[local], self._lists[remote]
        to, source = near.rows[np.asarray(local_ids)], far.rows[np.asarray(remote_ids)]
        if (to[:, 1] != source[:, 1]).any():
            raise RuntimeError("descriptors of unequal lengths")
        handle = self._next()
        self._reads[handle] = _Read(peer, to, source, near.kind, notif_msg)
        return handle

    def transfer(self, handle: int) -> str:
        self._reads[handle].asked = 0
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        read = self._reads[handle]
        read.asked += 1
        if read.asked < 2:
            return "PROC"
        try:
            for (address, size, _), (source, _, _) in zip(
                read.to.tolist(), read.source.tolist(), strict=True
            ):
                _read(read.peer.pid, source, address, size)
                compiled.forget(address, size)
        except OSError:
            evidence.count(unread=1)
            return "ERR"
        evidence.count(**{f"fetched_{read.kind.lower()}": int(read.to[:, 1].sum())})
        if read.notice is not None:
            self.send_notif(read.peer.name, read.notice)
        return "DONE"

    def get_xfer_telemetry(self, handle: int) -> Telemetry:
        rows = self._reads[handle].to
        return Telemetry(int(rows[:, 1].sum()), len(rows))

    def release_xfer_handle(self, handle: int) -> None:
        self._reads.pop(handle, None)

    def _next(self) -> int:
        self._handles += 1
        return self._handles


def _each(series: Any) -> Any:
    """Rows of address, bytes, device, stride and count, one row for each that they count."""
    counts = series[:, 4].astype(np.int64)
    rows = np.repeat(series[:, :3], counts, axis=0)
    number = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows[:, 0] += number.astype(np.uint64) * np.repeat(series[:, 3], counts)
    return rows


def _address(name: str) -> str:
    return f"\0nixl-{name}"


def _read(pid: int, source: int, target: int, size: int) -> None:
    near, far = _Span(target, size), _Span(source, size)
    done = _LIBC.process_vm_readv(
        pid, ctypes.byref(near), ctypes.c_ulong(1), ctypes.byref(far), ctypes.c_ulong(1), 0
    )
    if done != size:
        raise OSError(ctypes.get_errno(), f"{done} of {size} B of process {pid} were read")
