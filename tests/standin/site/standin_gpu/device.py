"""What torch offers of a CUDA device, on CPU tensors: streams, events, pinning, memory figures.

Work runs where it is enqueued, in program order, so a stream orders nothing and an event has
happened once it is recorded. Importing this changes nothing; ``pretend`` does, once a process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import torch

from standin_gpu import evidence

CARD_BYTES = int(os.environ.get("STANDIN_GPU_BYTES", str(2**30)))
CARDS = int(os.environ.get("STANDIN_GPUS", "8"))
_REAL_DEVICE = torch.device


class _DeviceMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _REAL_DEVICE)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _REAL_DEVICE)


class Device(metaclass=_DeviceMeta):
    """``torch.device``, where a CUDA device is the CPU."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        kind = kwargs.get("type", args[0] if args else None)
        if isinstance(kind, int) or (isinstance(kind, str) and kind.startswith("cuda")):
            return _REAL_DEVICE("cpu")
        return _REAL_DEVICE(*args, **kwargs)


class Stream:
    """One order of work, which the CPU keeps anyway."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0
    device = _REAL_DEVICE("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Event:
    """Has happened once it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Any) -> float:
        return 1.0

    def ipc_handle(self) -> bytes:
        return b"standin"

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> Event:
        return cls()


_STREAM = Stream()


class _Result(int):
    """What ``cudaHostRegister`` answers: 0 for done."""

    @property
    def value(self) -> int:
        return int(self)


pinned: dict[int, int] = {}
"""Bytes of each registered range, by its address."""


class _Runtime:
    """The calls of the CUDA runtime that pin memory. A range is registered once."""

    class cudaError:  # noqa: N801 (torch's name)
        success = _Result(0)

    @staticmethod
    def cudaHostRegister(address: int, size: int, flags: int = 0) -> _Result:  # noqa: N802
        pinned[address] = size
        return _Result(0)

    @staticmethod
    def cudaHostUnregister(address: int) -> _Result:  # noqa: N802
        time.sleep(float(os.environ.get("STANDIN_UNPIN_S", "0")))
        evidence.tell(unpinned_at=time.time())
        return _Result(0 if pinned.pop(address, None) is not None else 713)

    @staticmethod
    def cudaGetLastError() -> _Result:  # noqa: N802
        return _Result(0)


runtime = _Runtime()


def on_host(address: int) -> bool:
    """Whether pinned memory is there; all else is a card's."""
    return any(start <= address < start + size for start, size in pinned.items())


class OnCard(torch.Tensor):
    """A view of memory of a card that says so, for code that asks where a tensor is."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _REAL_DEVICE("cuda", 0)

    def get_device(self) -> int:
        return 0


def _unpinned(make: Any) -> Any:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        if isinstance(device, int) or str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


@contextlib.contextmanager
def _on(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _memory(*_: Any, **__: Any) -> tuple[int, int]:
    return CARD_BYTES, CARD_BYTES


_PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=CARD_BYTES,
    multi_processor_count=132,
    is_integrated=False,
    warp_size=32,
    shared_memory_per_block_optin=227 * 1024,
)


@functools.cache
def pretend() -> None:
    """From here on, torch in this process has CUDA devices."""
    torch.device = Device  # type: ignore[misc, assignment]
    for name in (
        "empty",
        "zeros",
        "ones",
        "full",
        "tensor",
        "arange",
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand",
        "randn",
        "randint",
        "empty_strided",
        "as_tensor",
        "linspace",
    ):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore[assignment, method-assign]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    real_to = torch.Tensor.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(
            "cpu" if isinstance(one, str) and one.startswith("cuda") else one for one in args
        )
        device = kwargs.get("device")
        if isinstance(device, str) and device.startswith("cuda"):
            kwargs["device"] = "cpu"
        return real_to(self, *args, **kwargs)

    torch.Tensor.to = to  # type: ignore[method-assign, assignment]
    torch.Stream = Stream  # type: ignore[misc, assignment]
    torch.Event = Event  # type: ignore[misc, assignment]
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "stream": _on,
        "device": _on,
        "current_stream": lambda *_: _STREAM,
        "default_stream": lambda *_: _STREAM,
        "synchronize": _nothing,
        "is_current_stream_capturing": lambda: False,
        "is_available": lambda: True,
        # vLLM spawns of itself where CUDA is in use already: no process here has touched a card.
        "is_initialized": lambda: False,
        "is_bf16_supported": lambda *_: True,
        "device_count": lambda: CARDS,
        "current_device": lambda: 0,
        "set_device": _nothing,
        "empty_cache": _nothing,
        "mem_get_info": _memory,
        "memory_stats": lambda *_: {},
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": _nothing,
        "get_device_properties": lambda *_: _PROPERTIES,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: _PROPERTIES.name,
        "manual_seed_all": _nothing,
        "cudart": lambda: runtime,
    }.items():
        setattr(torch.cuda, name, value)
    for name, value in {
        "synchronize": _nothing,
        "current_device_index": lambda: 0,
        "current_device_idx": lambda: 0,
        "set_device_index": _nothing,
        "set_device_idx": _nothing,
        "device_index": _on,
        "device_count": lambda: CARDS,
        "current_stream": lambda *_: _STREAM,
        "set_stream": _nothing,
        "empty_cache": _nothing,
        "empty_host_cache": _nothing,
        "memory_stats": lambda *_: {},
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "max_memory_reserved": lambda *_: 0,
        "reset_peak_memory_stats": _nothing,
        "get_memory_info": _memory,
        "is_available": lambda: True,
        "current_accelerator": lambda *_, **__: _REAL_DEVICE("cpu"),
    }.items():
        setattr(torch.accelerator, name, value)
    # vLLM has put its own before torch's, where its module is there already.
    utils = sys.modules.get("vllm.utils.torch_utils")
    if utils is not None:
        utils.prev_set_stream = _nothing
    else:
        torch.cuda.set_stream = _nothing
    torch.cuda.memory.get_allocator_backend = lambda: "stand-in"


class AnythingGoes(types.ModuleType):
    """An extension module that only CUDA builds have; nothing in it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def missing_extensions() -> None:
    for name in (
        "vllm._C_stable_libtorch",
        "vllm.vllm_flash_attn",
        "vllm.compilation.passes.pass_manager",
    ):
        sys.modules.setdefault(name, AnythingGoes(name))
