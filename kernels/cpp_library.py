"""Finds and loads the C++ backend's shared library, built by ``setup.py`` next to this file.

It has a plain C interface and no Python or torch in it, so ctypes loads it, calls release the
GIL, and one build serves every Python and torch version.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

ABI_VERSION = 3
"""Must equal ``hisparsed_abi_version()``: an old build under new Python would misread structs."""


@cache
def load() -> ctypes.CDLL:
    """The library. Raises ``OSError`` that says why there is none."""
    folder = Path(__file__).resolve().parent
    reason = (
        "the C++ library was not built; install hisparsed where a C++17 compiler is (c++ or g++)"
    )
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_cpp{suffix}"
        if path.exists():
            library = ctypes.CDLL(str(path))
            found = int(library.hisparsed_abi_version())
            if found == ABI_VERSION:
                return library
            reason = (
                f"{path.name} has interface {found}, this version needs {ABI_VERSION}; "
                "rebuild it: python setup.py build_ext --inplace, or install hisparsed again"
            )
    raise OSError(reason)
