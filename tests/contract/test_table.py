"""The table of vLLM names holds on every tested version, says all that the code touches, and
docs/compatibility.md says what the table and the snapshots say.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from hisparsed.engine.compat.versions import TESTED
from tests.contract.complaints import complaints
from tests.contract.page import page
from tests.contract.source_tree import SourceTree
from tests.contract.surface import Place
from tests.contract.touch import How, Touch, Use
from tests.contract.touched import PUBLIC, all_touched

TABLE = all_touched()
HERE = "tests.contract.touched"


@pytest.mark.parametrize("version", TESTED)
def test_every_name_is_there_and_fits_what_we_do_with_it(
    version: str, snapshot: Callable[[str], dict[str, Place]], own: SourceTree
) -> None:
    assert complaints(TABLE, snapshot(version), version, own) == []


@pytest.mark.parametrize("touch", TABLE, ids=lambda touch: touch.target)
def test_each_entry_is_of_code_that_touches_it(touch: Touch, own: SourceTree) -> None:
    sources = [source_of(own, module) for module in touch.by]

    unknown = [use.name for use in touch.uses if use.name and not mentioned(use.name, sources)]
    idle = [
        module
        for module, source in zip(touch.by, sources, strict=True)
        if not any(mentioned(name, [source]) for name in _names(touch))
    ]

    assert unknown == []
    assert idle == []


def test_every_vllm_import_of_ours_is_in_the_table(own: SourceTree) -> None:
    known = {touch.target for touch in TABLE} | PUBLIC
    known |= {
        f"{touch.module}:{use.name}" for touch in TABLE if not touch.name for use in touch.uses
    }
    missing = [
        f"{file}: {target}"
        for file in sorted(own.folder.rglob("*.py"))
        for target in _imports(file)
        if target not in known
    ]

    assert missing == []


def test_what_not_every_version_has_is_behind_an_adapter_that_exists() -> None:
    every: list[tuple[str, Touch | Use]] = [(touch.target, touch) for touch in TABLE]
    every += [(touch.target, use) for touch in TABLE for use in touch.uses]
    bounded = [each for each in every if each[1].since is not None or each[1].until is not None]
    without = [
        target
        for target, one in bounded
        if one.adapter is None or find_spec(f"hisparsed.{one.adapter}") is None
    ]

    assert bounded
    assert without == []


def test_every_entry_says_why_and_what_breaks() -> None:
    silent = [touch.target for touch in TABLE if not (touch.why and touch.breaks and touch.by)]

    assert silent == []


def _names(touch: Touch) -> Iterator[str]:
    yield from (use.name for use in touch.uses if use.name)
    yield touch.name or touch.module


def mentioned(name: str, sources: list[str]) -> bool:
    return any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", source) for source in sources)


@cache
def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def source_of(own: SourceTree, module: str) -> str:
    path = own.folder.joinpath(*module.split("."))
    return _text(
        path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    )


def _imports(file: Path) -> Iterator[str]:
    if "vllm" not in _text(file) or "contract/touched" in file.as_posix():
        return
    for node in ast.walk(ast.parse(_text(file))):
        if isinstance(node, ast.ImportFrom) and re.match(r"vllm(\.|$)", node.module or ""):
            yield from (f"{node.module}:{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("vllm."))


def test_a_use_that_is_gone_is_told_with_its_reason(own: SourceTree) -> None:
    touch = Touch("vllm.a:A", ("engine.plugin",), "why", "all stops", (Use(How.READS, "gone"),))

    assert complaints([touch], {"vllm.a:A": Place("vllm.a:A")}, "0.33.0", own) == [
        "vllm.a:A reads gone: there is none"
    ]
    assert complaints([touch], {}, "0.33.0", own) == ["vllm.a:A is not there; all stops"]


def test_a_bound_that_is_too_narrow_is_told(own: SourceTree) -> None:
    use = Use(How.READS, "late", since="0.33", adapter="engine.compat.adapters")
    touch = Touch("vllm.a:A", ("engine.plugin",), "why", "all stops", (use,))
    surface = {"vllm.a:A": Place("vllm.a:A", members={"late": "attribute"})}

    assert complaints([touch], surface, "0.33.0", own) == []
    assert complaints([touch], surface, "0.32.0", own) == [
        "vllm.a:A reads late: fits, outside of since and until"
    ]


DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"


def test_the_page_is_current(snapshot: Callable[[str], dict[str, Place]]) -> None:
    current = page(all_touched(), {version: snapshot(version) for version in TESTED})

    assert DOCUMENT.read_text(encoding="utf-8") == current, "`make compatibility` writes it anew"


def test_every_private_member_is_listed_with_its_reason() -> None:
    listed = DOCUMENT.read_text(encoding="utf-8").partition("## Private names")[2]
    listed = listed.partition("## All names")[0]

    for touch in all_touched():
        names = [use.name for use in touch.uses if use.how is not How.TEXT]
        private = [name for name in names if name.startswith("_") and not name.startswith("__")]
        if private:
            (line,) = [
                line
                for line in listed.splitlines()
                if f"`{touch.target}`" in line and f"| {touch.why} | {touch.breaks} |" in line
            ]
            assert [name for name in private if f"`{name}`" not in line] == []
