"""Shared by all tests: repeatable examples, logs as Python sets them up, memory given back."""

import gc
import logging
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from tests.examples import ALL

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_sessionstart(session: pytest.Session) -> None:
    """A C++ library of another revision is refused, so it is built again, before any worker.

    It is tried in a separate process: a process that has loaded the old one cannot load the new
    one.
    """
    if hasattr(session.config, "workerinput"):
        return
    root = Path(__file__).parents[1]
    load = [sys.executable, "-c", "from hisparsed.kernels.cpp_library import load; load()"]
    if subprocess.run(load, cwd=root, check=False, capture_output=True).returncode:
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
        subprocess.run(build, cwd=root, check=False, capture_output=True)


def pytest_configure(config: pytest.Config) -> None:
    ALL[0] = config.getoption("markexpr") in ("long", "")
    # Until all tests are read: what they import stays, and is a fifth slower to import otherwise.
    gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ALL[0] and item.get_closest_marker("examples"):
            item.add_marker("long")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reports cross to pytest-xdist's controller as UTF-8, which lone surrogates in logs break."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(autouse=True)
def _logs_are_python_s_own() -> None:
    """A test that configured the daemon's logs must not hide them from the next one's."""
    logger = logging.getLogger("hisparsed")
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


_GROWTH_BYTES = 1 << 30
_resident_bytes = [0]
"""After the last sweep."""


@pytest.fixture(autouse=True)
def _past_engines_are_freed() -> Iterator[None]:
    """vLLM freezes the garbage collector's heap, so an engine that a test built would never be
    freed."""
    yield
    if psutil.Process().memory_info().rss > _resident_bytes[0] + _GROWTH_BYTES:
        gc.unfreeze()
        gc.collect()
        _resident_bytes[0] = psutil.Process().memory_info().rss


@pytest.fixture(scope="session")
def cpp_is_built() -> None:
    """The package's own build makes the C++ library wherever a compiler is."""
    from hisparsed.kernels import cpp_library

    cpp_library.load()
