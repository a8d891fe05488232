"""The compiled part of the package: everything else is in pyproject.toml.

Optional, so that a machine without a compiler still installs; the torch backend then serves.
"""

from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("kernels/cpp")

setup(
    ext_modules=[
        Extension(
            "hisparsed.kernels._cpp",
            sources=sorted(str(path) for path in SOURCES.glob("*.cpp")),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            extra_compile_args=["-std=c++17", "-O3", "-g0", "-pthread"],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
    ]
)
