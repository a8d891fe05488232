"""What pyproject.toml cannot say: which packages there are, and the compiled part.

Packages are looked for in the folders of `package-dir`, and not through the links in hisparsed/,
since an sdist has no links. The extension is optional, so that a machine without a compiler still
installs; the torch backend then serves.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path

from setuptools import Extension, find_namespace_packages, setup

SOURCES = Path("kernels/cpp")
PROJECT = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))


def packages() -> Iterator[str]:
    folders: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]
    for package, folder in folders.items():
        yield package
        for found in find_namespace_packages(folder, exclude=["*__pycache__*"]):
            if f"{package}.{found.partition('.')[0]}" not in folders:
                yield f"{package}.{found}"


setup(
    packages=sorted(packages()),
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
    ],
)
