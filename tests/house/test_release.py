"""The contents of a release: as many files as are tracked, the entry points, compiled kernels."""

from __future__ import annotations

from typing import Any

import pytest

from tests.house.test_packaging import PROJECT, load

TOOL: Any = load("release")
FOLDERS = {"hisparsed": "hisparsed", "hisparsed.etc": "etc", "hisparsed.tui": "tui"}
TRACKED = ["README.md", "hisparsed/cli/app.py", "etc/nodes/a.yaml", "tui/app.py", "tests/tui/a.py"]
PACKED = ["hisparsed/cli/app.py", "hisparsed/etc/nodes/a.yaml", "hisparsed/tui/app.py"]
COMPILED = "hisparsed/kernels/_cpp.cpython-311-x86_64-linux-gnu.so"
METADATA = "hisparsed-9.dist-info/METADATA"


def test_a_wheel_has_what_is_tracked_in_the_folders_of_the_package() -> None:
    assert TOOL.expected_files(TRACKED, FOLDERS) == set(PACKED)


@pytest.mark.parametrize(
    ("packed", "wrong"),
    [
        ([*PACKED, COMPILED, METADATA], []),
        ([*PACKED[:2], COMPILED], ["hisparsed/tui/app.py is not in the wheel"]),
        ([*PACKED, COMPILED, "hisparsed/x.py"], ["hisparsed/x.py is in the wheel, not tracked"]),
        (PACKED, ["the wheel has no compiled kernels; is there a C++ compiler?"]),
    ],
)
def test_what_is_missing_and_what_is_too_much_is_named(packed: list[str], wrong: list[str]) -> None:
    assert TOOL.compare(packed, set(PACKED)) == wrong


def test_entry_points_are_those_of_the_project() -> None:
    project = PROJECT["project"]
    text = "[console_scripts]\nhisparsed = hisparsed.cli.app:main\n"
    for group, points in project["entry-points"].items():
        text += f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
    assert TOOL.compare_entry_points(text, project) == []
    (said,) = TOOL.compare_entry_points(text.replace("app:main", "app:other"), project)
    assert "app:other" in said
