"""Sources are read as Python would run them, without running them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.complaints import complaints
from tests.contract.signature import parse_signature
from tests.contract.source_tree import Definition, SourceTree, call_signature, members_of
from tests.contract.surface import call_shapes, parse_surface, read_surface, surface_text
from tests.contract.touch import Touch, calls, fields, overrides, reads, sets, texts

VLLM = {
    "__init__.py": """
import typing
TABLE = {"Params": ".core:Params"}
if typing.TYPE_CHECKING:
    from vllm.core import Params
else:
    def __getattr__(name): ...
""",
    "core.py": """
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar
from . import other

@dataclass
class Params:
    size: int
    kind: ClassVar[str] = "x"
    names: list = field(default_factory=list)
    limit: int = 3

class Base(ABC):
    def __init__(self, pool, *, depth=1):
        self.pool = pool
        self.depth: int = depth
    @property
    def width(self): return 1
    @property
    def height(self): return self._height
    @height.setter
    def height(self, value): self._height = value
    @abstractmethod
    def load(self, job, source): ...
    @classmethod
    def make(cls, config): ...
    @staticmethod
    def hash(key, /): ...
    def work(self): self.load(1, source=2)

class Child(other.Mixin, Base):
    def load(self, job, source, fast=False): ...
""",
    "other.py": """
from vllm.core import Base as Renamed
KEY = "spec_name"
class Mixin:
    def load(self, job): ...
def free(blocks, *rest, **more): ...
""",
}
OURS = {
    "__init__.py": "",
    "part.py": """
from vllm.core import Base
class Mine(Base):
    def load(self, job): return super().load(job)
    def hidden(self): ...
    def pool(self): ...
""",
}


@pytest.fixture
def vllm(tmp_path: Path) -> SourceTree:
    return write(tmp_path / "vllm", VLLM)


@pytest.fixture
def ours(tmp_path: Path) -> SourceTree:
    return write(tmp_path / "hisparsed", OURS)


def write(folder: Path, files: dict[str, str]) -> SourceTree:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return SourceTree(folder)


def found(tree: SourceTree, module: str, name: str) -> Definition:
    definition = tree.find(module, name)
    assert definition is not None
    return definition


def test_names_are_found_through_imports_renames_and_lazy_tables(vllm: SourceTree) -> None:
    assert found(vllm, "vllm", "Params").place == "vllm.core:Params"
    assert found(vllm, "vllm.other", "Renamed").place == "vllm.core:Base"
    assert vllm.find("vllm.other", "Base") is None
    assert vllm.find("vllm.nowhere", "Base") is None


def test_members_come_from_bases_and_from_what_methods_set(vllm: SourceTree) -> None:
    members = members_of(vllm, found(vllm, "vllm.core", "Base"))

    assert members["depth"].kind == "attribute"
    assert members["width"].kind == "property"
    assert members["height"].kind == "settable"
    assert members["make"].signature == "config"
    assert members["hash"].signature == "key, /"
    assert members["load"].abstract


def test_the_nearest_base_wins_and_an_implementation_ends_an_abstract_method(
    vllm: SourceTree,
) -> None:
    child = found(vllm, "vllm.core", "Child")

    assert [one.node.name for one in vllm.lineage(child)] == ["Child", "Mixin", "Base"]
    load = members_of(vllm, child)["load"]
    assert (load.signature, load.abstract) == ("job, source, fast=...", False)


def test_a_data_class_is_called_with_its_fields(vllm: SourceTree) -> None:
    assert call_signature(vllm, found(vllm, "vllm", "Params")) == "size, names=..., limit=..."
    assert call_signature(vllm, found(vllm, "vllm.core", "Child")) == "pool, *, depth=..."


@pytest.mark.parametrize(
    ("positional", "keywords", "refusal"),
    [
        (2, (), None),
        (1, ("blocks",), None),
        (1, ("blocks", "cap"), None),
        (1, (), "also needs blocks"),
        (3, (), "takes 2 positional arguments, not 3"),
        (2, ("blocks",), "is given blocks twice"),
        (2, ("gone",), "has no parameter gone"),
    ],
)
def test_a_call_fits_as_python_would_have_it(
    positional: int, keywords: tuple[str, ...], refusal: str | None
) -> None:
    assert parse_signature("request, blocks, *, cap=...").refusal(positional, keywords) == refusal


@pytest.mark.parametrize(
    ("ours", "problem"),
    [
        ("job, source, fast=...", None),
        ("job, *args, **kwargs", None),
        ("job, source, fast=..., more=...", None),
        ("job, source", "fast cannot be given by position"),
        ("job, src, fast=...", "its parameter 2 is src, not source"),
        ("job, source, fast", "it needs fast, which may be left out"),
        ("job, *args", "source cannot be given by name"),
    ],
)
def test_an_override_must_take_all_that_the_original_takes(ours: str, problem: str | None) -> None:
    assert parse_signature(ours).narrower(parse_signature("job, source, fast=...")) == problem


def test_calls_of_a_method_are_found_only_where_its_name_is_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "vllm"
    (folder / "v1" / "core").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "v1" / "__init__.py").write_text("")
    (folder / "v1" / "core" / "__init__.py").write_text("")
    (folder / "v1" / "core" / "a.py").write_text(
        "class A:\n  def take(self, n): ...\n  def free(self): ...\n"
        "class B(A):\n  def take(self, n): super().take(n)\n"
        "class Stranger:\n  def free(self, x): ...\n"
        "def run(a): a.take(3); a.take(n=3); a.free(); a.take(*a.more, flag=1)\n"
    )
    target = "vllm.v1.core.a:A"

    assert call_shapes(SourceTree(folder), {target: {"take", "free"}}) == {
        target: {"take": ("0, flag, *", "0, n", "1")}
    }


def test_overrides_super_calls_and_hidden_names_are_judged(
    vllm: SourceTree, ours: SourceTree
) -> None:
    touch = Touch("vllm.core:Base", ("part",), "why", "breaks", overrides("load"), ("part:Mine",))

    told = complaints([touch], read_surface(vllm, [touch]), "0.33.0", ours)

    assert told == [
        "part:Mine calls load(1) of vLLM's, (job, source): also needs source",
        "part:Mine.pool hides vllm.core:Base.pool, which is not in the table",
        "part:Mine.load: (job) is called as (job, source): source cannot be given by position",
    ]


def test_what_a_subclass_leaves_out_is_told(vllm: SourceTree, ours: SourceTree) -> None:
    (ours.folder / "part.py").write_text("class Mine: ...\n")
    touch = Touch("vllm.core:Base", ("part",), "why", "breaks", (), ("part:Mine",))

    told = complaints([touch], read_surface(vllm, [touch]), "0.33.0", SourceTree(ours.folder))

    assert told == ["part:Mine lacks load, which vllm.core:Base wants"]


def test_each_kind_of_use_is_held_against_the_source(vllm: SourceTree, ours: SourceTree) -> None:
    good = (
        Touch("vllm:Params", ("part",), "w", "b", (*fields("limit"), *calls("", 1, "names"))),
        Touch("vllm.core:Base", ("part",), "w", "b", (*sets("height"), *calls("make", 1))),
        Touch("vllm.other", ("part",), "w", "b", (*texts("spec_name"), *reads("KEY"))),
        Touch("vllm.other:free", ("part",), "w", "b", calls("", 3, "any")),
    )
    bad = (
        Touch("vllm:Params", ("part",), "w", "b", (*fields("kind"), *calls())),
        Touch("vllm.core:Base", ("part",), "w", "b", (*sets("width"), *calls("depth"))),
        Touch("vllm.other", ("part",), "w", "b", (*texts("spec"), *reads("GONE"))),
        Touch("vllm.other:free", ("part",), "w", "b", calls("", 0, "any")),
    )

    assert complaints(good, read_surface(vllm, good), "0.33.0", ours) == []
    assert complaints(bad, read_surface(vllm, bad), "0.33.0", ours) == [
        "vllm:Params field kind: (size, names=..., limit=...) has no kind",
        "vllm:Params calls itself: (size, names=..., limit=...) also needs size",
        "vllm.core:Base sets width: is a property without a setter",
        "vllm.core:Base calls depth: cannot be called, it is: attribute",
        "vllm.other text spec: the source has no such text",
        "vllm.other reads GONE: there is none",
        "vllm.other:free calls itself: (blocks, *rest, **more) also needs blocks",
    ]


def test_a_snapshot_says_what_was_read(vllm: SourceTree) -> None:
    touches = [Touch("vllm.core:Base", ("part",), "w", "b", overrides("load"), ("part:Mine",))]
    surface = read_surface(vllm, touches)

    assert parse_surface(surface_text(surface)) == surface
