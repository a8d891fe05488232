"""Pages that can be found: links and anchors lead somewhere, and every page has its kind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])
WRAPPED = [page for page in PAGES if page.name != "CHANGELOG.md"]
SOURCES = ("etc", "hisparsed", "policy", "tui", "kernels", "systemd", "tests", "Makefile")
LINK = re.compile(r"\]\(([^)\s]+)\)")
MENTION = re.compile(r"docs/[\w/-]+\.(?:md|svg)(?:#[\w-]+)?")
KINDS = {
    "Get started": "Get started.",
    "How-to guides": "How-to guide.",
    "Reference": "Reference.",
    "Explanation": "Explanation.",
}


def without_code(text: str) -> str:
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", without_code(page.read_text("utf-8")), re.MULTILINE):
        plain = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def missing(target: str, folder: Path) -> Iterator[str]:
    path, _, anchor = target.partition("#")
    page = folder / path if path else folder
    if not page.exists():
        yield f"{target}: no such file"
    elif anchor and anchor not in anchors(page):
        yield f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    wrong: list[str] = []
    for target in LINK.findall(without_code(page.read_text("utf-8"))):
        if target.startswith("#"):
            wrong += missing(target, page)
        elif "://" not in target:
            wrong += missing(target, page.parent)
    assert wrong == []


def test_pages_that_files_name_are_there() -> None:
    wrong = []
    for name in SOURCES:
        top = ROOT / name
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.suffix in {".py", ".yaml", ".toml", ".service", ".env", ".cpp"} or path == top:
                if not path.is_file():
                    continue
                for mention in MENTION.findall(path.read_text("utf-8")):
                    wrong += [f"{path.name}: {what}" for what in missing(mention, ROOT)]
    assert wrong == []


@pytest.mark.parametrize("page", WRAPPED, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_wrapped_at_100_columns(page: Path) -> None:
    """But for tables, code, headings, and lines that one link or one command fills."""
    text = re.sub(r"^    .*$", "", without_code(page.read_text("utf-8")), flags=re.MULTILINE)
    free = re.compile(r"\s*(?:\||#|!\[|`hisparsed |From five minutes|`policy`)")
    long = [line for line in text.splitlines() if len(line) > 100 and not free.match(line)]
    assert long == []


def test_the_index_has_every_page_under_the_kind_that_the_page_names() -> None:
    sections = re.split(r"^## (.+)$", (DOCS / "README.md").read_text("utf-8"), flags=re.MULTILINE)
    listed = []
    for title, text in zip(sections[1::2], sections[2::2], strict=True):
        for name in re.findall(r"^\| \[(.+?\.md)\]", text, re.MULTILINE):
            listed.append(name)
            line = (DOCS / name).read_text("utf-8").splitlines()[2]
            assert line == f"*{KINDS[title]}* [All pages](README.md)", name
    there = {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    assert sorted(listed) == sorted(there)
