"""One import path for the folder: the oracle and the harness are plain modules here."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def cpp_is_built() -> None:
    """The package's own build makes the C++ library wherever a compiler is."""
    from hisparsed.kernels import cpp_library

    cpp_library.load()
