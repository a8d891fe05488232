"""Which backend serves, and what is said when the C++ library is missing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hisparsed.kernels import api, backends, cpp_library

CPU = torch.device("cpu")


@pytest.fixture
def fresh_choice() -> Iterator[None]:
    backends._why_no_cpp.cache_clear()
    yield
    backends._why_no_cpp.cache_clear()


@pytest.mark.usefixtures("cpp_is_built", "fresh_choice")
def test_auto_is_cpp_on_the_cpu_triton_on_cuda_and_torch_elsewhere() -> None:
    assert backends.pick("auto", CPU) == "cpp"
    assert backends.pick("auto", torch.device("meta")) == "torch"
    assert backends.pick("auto", torch.device("cuda")) == "triton"
    with pytest.raises(ValueError, match="backend cpp works on CPU tensors, the state is on meta"):
        backends.pick("cpp", torch.device("meta"))


@pytest.mark.usefixtures("fresh_choice")
def test_without_the_library_auto_says_why_once_and_uses_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> None:
        raise OSError("no library today")

    monkeypatch.setattr(cpp_library, "load", missing)
    with caplog.at_level(logging.WARNING):
        assert backends.pick("auto", CPU) == backends.pick("auto", CPU) == "torch"
    assert [record.getMessage() for record in caplog.records] == [
        "kernels: auto uses the slower torch backend on the CPU: no library today"
    ]
    with pytest.raises(RuntimeError, match="backend cpp is not available: no library today"):
        backends.pick("cpp", CPU)


@pytest.mark.usefixtures("cpp_is_built")
def test_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_library, "ABI_VERSION", 999)
    with pytest.raises(OSError, match="needs 999; rebuild it"):
        cpp_library.load.__wrapped__()


def test_folder_stays_a_namespace_package() -> None:
    """With an __init__.py, transformers takes the repository root for the kernels distribution."""
    assert not (Path(api.__file__).parent / "__init__.py").exists()
