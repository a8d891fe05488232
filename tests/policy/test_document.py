"""Documents: what is accepted, and for each kind of error the line, key, value and hint."""

import hashlib
from pathlib import Path
from typing import Annotated, Literal, Self

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from hisparsed.policy.document import load_document, parse_document
from hisparsed.policy.problems import ConfigError, Problem, refuse
from hisparsed.policy.units import ByteSize, Duration, Fraction
from hisparsed.policy.yaml_tree import read_scalar, read_tree

GOOD = """\
# a comment
mode: off
pools:
  offload:
    floor: 4GiB
    share: 10%
steps:
  - kind: wait
    seconds: 3
  - kind: move
    to: "12:30"
"""


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Pool(Strict):
    floor: ByteSize = 0
    ceiling: ByteSize = 2**40
    share: Fraction = 1.0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.floor > self.ceiling:
            raise refuse("order", "is below the floor", hint="raise it", key=("ceiling",))
        return self


class Wait(Strict):
    kind: Literal["wait"]
    seconds: int = Field(ge=1, le=60)


class Move(Strict):
    kind: Literal["move"]
    to: str = Field(description="where to, such as offload")


class Document(Strict):
    mode: Literal["act", "advise", "off"] = "act"
    enabled: bool = True
    ratio: float = Field(default=1.0, gt=0, lt=10)
    name: str | None = Field(default=None, min_length=2)
    pools: dict[str, Pool] = Field(default_factory=dict)
    steps: list[Annotated[Wait | Move, Field(discriminator="kind")]] = Field(default_factory=list)


def problems_in(text: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        parse_document(text, "etc/policy.yaml", Document)
    return list(caught.value.problems)


def the_problem(text: str) -> Problem:
    (problem,) = problems_in(text)
    return problem


def test_good_document() -> None:
    loaded = parse_document(GOOD, "etc/policy.yaml", Document)
    assert loaded.value == Document(
        mode="off",
        pools={"offload": Pool(floor=4 * 2**30, share=0.1)},
        steps=[Wait(kind="wait", seconds=3), Move(kind="move", to="12:30")],
    )
    assert loaded.content_hash == hashlib.sha256(GOOD.encode()).hexdigest()
    assert loaded.path == Path("etc/policy.yaml")
    place = loaded.positions["pools", "offload", "floor"]
    assert (place.line, place.column, place.value_line, place.value_column) == (5, 5, 5, 12)
    assert loaded.positions["steps", 1, "to"].line == 11


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("off", "off"),
        ("on", "on"),
        ("yes", "yes"),
        ("No", "No"),
        ("y", "y"),
        ("12:30", "12:30"),
        ("010", "010"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("2026-01-02", "2026-01-02"),
        ("=", "="),
        ("'12'", "12"),
    ],
)
def test_what_looks_like_text_is_text(written: str, value: str) -> None:
    class Any1(Strict):
        it: str

    assert parse_document(f"it: {written}", "f", Any1).value.it == value


@pytest.mark.parametrize(
    ("written", "value"),
    [("1", 1), ("-3", -3), ("1.5", 1.5), ("1e3", 1000.0), (".5", 0.5), ("true", True), ("~", None)],
)
def test_plain_values(written: str, value: object) -> None:
    class Any1(Strict):
        it: object

    found = parse_document(f"it: {written}", "f", Any1).value.it
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "line", "column", "key", "value", "says"),
    [
        (
            "pools:\n  offload:\n    floor: 4 GB/s\n",
            3,
            12,
            ("pools", "offload", "floor"),
            '"4 GB/s"',
            'pools.offload.floor: "4 GB/s" is not a size; write a number with a unit such as 4GiB',
        ),
        ("mood: act", 1, 1, ("mood",), '"act"', "mood: is not a known key; did you mean mode?"),
        (
            "pools:\n  a:\n    flor: 1\n",
            3,
            5,
            ("pools", "a", "flor"),
            "1",
            "pools.a.flor: is not a known key; did you mean floor?",
        ),
        (
            "<<: {mode: act}",
            1,
            1,
            ("<<",),
            '{"mode": "act"}',
            "<<: is not a known key; known here: mode, enabled, ratio, name, pools, steps",
        ),
        ("mode: of", 1, 7, ("mode",), '"of"', 'mode: "of" is not one of act, advise, off; '
         "did you mean off?"),
        ("enabled: maybe", 1, 10, ("enabled",), '"maybe"', 'enabled: "maybe" is neither true nor '
         "false; write true or false"),
        ("ratio: 0", 1, 8, ("ratio",), "0", "ratio: 0 is too small; write more than 0"),
        ("ratio: 10.0", 1, 8, ("ratio",), "10.0", "ratio: 10.0 is too large; write less than 10"),
        ("ratio: half", 1, 8, ("ratio",), '"half"', 'ratio: "half" is not a number; '
         "write a number such as 2 or 0.5"),
        ("name: 12", 1, 7, ("name",), "12", "name: 12 is not text; put it in quotes"),
        ("name: x", 1, 7, ("name",), '"x"', 'name: "x" has the wrong length; '
         "write at least 2 characters or items"),
        ("mode:", 1, 6, ("mode",), "null", "mode: is empty; give it a value, or remove the key to "
         "use the default"),
        ("pools: 3", 1, 8, ("pools",), "3", "pools: 3 is not a section; write `key: value` lines "
         "below it"),
        ("steps: 3", 1, 8, ("steps",), "3", "steps: 3 is not a list; write one `- item` line for "
         "each"),
        ("steps:\n- kind: wait\n  seconds: 99", 3, 12, ("steps", 0, "seconds"), "99",
         "steps[0].seconds: 99 is too large; write 60 or less"),
        ("steps:\n- kind: wait\n  seconds: 1.5", 3, 12, ("steps", 0, "seconds"), "1.5",
         "steps[0].seconds: 1.5 is not a whole number; write digits only"),
        ("steps:\n- kind: move\n", 2, 3, ("steps", 0, "to"), "",
         "steps[0].to: is missing; add to: where to, such as offload"),
        ("steps:\n- kind: move\n  to: a\n  too: b\n", 4, 3, ("steps", 0, "too"), '"b"',
         "steps[0].too: is not a known key; did you mean to?"),
        ("pools:\n  a: {floor: 2GiB, ceiling: 1GiB}\n", 2, 29, ("pools", "a", "ceiling"), "",
         "pools.a.ceiling: is below the floor; raise it"),
        ("pools:\n  a:\n    floor: 2TiB\n", 2, 3, ("pools", "a", "ceiling"), "",
         "pools.a.ceiling: is below the floor; raise it"),
    ],
)  # fmt: skip
def test_invalid_value(
    text: str, line: int, column: int, key: tuple[str | int, ...], value: str, says: str
) -> None:
    problem = the_problem(text)
    assert (problem.line, problem.column, problem.key) == (line, column, key)
    assert str(problem) == f"etc/policy.yaml:{line}: {says}"
    if value:
        assert problem.value == value


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", 0, "is empty; write settings as `key: value` lines"),
        ("# nothing\n", 0, "is empty; write settings as `key: value` lines"),
        ("null", 0, "is empty; write settings as `key: value` lines"),
        ("- a\n", 1, "holds something else where settings belong; write `key: value` lines"),
        ("just text", 1, "holds something else where settings belong; write `key: value` lines"),
        ("mode: act\nmode: off\n", 2, "mode: is there twice; it is on line 1 already; remove one"),
        ("mode: act\n---\nmode: off\n", 2, "a second document begins here; keep one document"),
        ("pools:\n\ta: 1\n", 2, "a tab is used for indentation; indent with spaces"),
        ("mode: *that\n", 1, "not readable as YAML: found undefined alias 'that'"),
        ("mode: act\nname: [1\n", 3, "not readable as YAML: while parsing a flow sequence"),
        ("mode: a: b\n", 1, "not readable as YAML: mapping values are not allowed here"),
        ("mode: act\nname: \x07x\n", 2, "the character U+0007 is not allowed; remove it"),
        ("1: act\n", 1, '"1" cannot be a key; write keys as text'),
        ("? [a]\n: act\n", 1, "a list or a section cannot be a key; write keys as text"),
        ("name: !!python/object:os.system ls\n", 1, 'name: the tag "!!python/object:os.system" is'),
        ("pools: !custom {}\n", 1, 'pools: the tag "!custom" is not allowed here; remove it'),
        ("name: !!int abc\n", 1, 'name: the tag "!!int" is not allowed here; remove it'),
        ("ratio: " + "9" * 50, 1, 'ratio: "999'),
        ("pools: &a {b: *a}\n", 1, "an alias contains itself"),
        ("name: " + "[" * 40, 1, "is nested deeper than 32 levels; write it flatter"),
        ("# " + "x" * 2**20, 0, "is larger than 1MiB"),
    ],
)
def test_unreadable_text(text: str, line: int, says: str) -> None:
    problem = the_problem(text)
    assert problem.line == line
    place = f"etc/policy.yaml:{line}" if line else "etc/policy.yaml"
    assert str(problem).startswith(f"{place}: {says}")


def test_aliases_are_bounded() -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    problem = the_problem("\n".join(levels))
    assert problem.message == "has more than 20000 values once its aliases are written out"


def test_an_alias_may_be_used() -> None:
    text = "pools:\n  a: &same {floor: 1GiB}\n  b: *same\n"
    pools = parse_document(text, "f", Document).value.pools
    assert pools["a"] == pools["b"] == Pool(floor=2**30)


def test_all_problems_in_line_order() -> None:
    text = (
        "steps:\n- kind: wait\n  seconds: 0\nmode: of\nmode: off\nextra: 1\n"
        "pools: {a: {floor: x}}\n"
    )
    assert [(problem.line, problem.key) for problem in problems_in(text)] == [
        (3, ("steps", 0, "seconds")),
        (5, ("mode",)),
        (6, ("extra",)),
        (7, ("pools", "a", "floor")),
    ]


def test_render_shows_the_line() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_document(GOOD.replace("4GiB", "4 GB/s"), "etc/policy.yaml", Document)
    assert caught.value.render() == (
        'etc/policy.yaml:5: pools.offload.floor: "4 GB/s" is not a size; '
        "write a number with a unit such as 4GiB\n"
        "  5 |     floor: 4 GB/s\n"
        "    |            ^"
    )
    assert str(caught.value) == caught.value.render().splitlines()[0]


@pytest.mark.parametrize("pools_before", [0, 10, 900])
def test_of_a_long_line_only_what_is_around_the_place_is_shown(pools_before: int) -> None:
    before = "".join(f"p{number}: {{}}, " for number in range(pools_before))
    line = f"pools: {{{before}bad: {{share: 200%}}}} # {'x' * 5000}"
    with pytest.raises(ConfigError) as caught:
        parse_document(line, "f", Document)
    _, source, mark = caught.value.render().splitlines()
    assert len(source) < 120
    assert source[mark.index("^") :].startswith("200%")


def test_bounds_are_told_in_the_unit_that_was_written() -> None:
    class Timed(Strict):
        version: Literal[1]
        tick: Annotated[Duration, Field(ge=0.05)] = 1.0
        size: Annotated[ByteSize, Field(ge=2**20)] = 2**30

    with pytest.raises(ConfigError) as caught:
        parse_document("tick: 1ms\nsize: 4KiB\n", "f", Timed)
    assert str(caught.value).splitlines() == [
        "f:1: version: is missing; add version: 1",
        'f:1: tick: "1ms" is too small; write 50ms or more',
        'f:2: size: "4KiB" is too small; write 1MiB or more',
    ]


def test_braces_in_a_value_stay_as_they_are() -> None:
    problem = the_problem("pools:\n  a:\n    floor: '{x}'\n")
    assert problem.message == '"{x}" is not a size'


def test_a_long_value_is_cut() -> None:
    problem = the_problem(f"ratio: {'x' * 500}")
    assert len(problem.value) == 60
    assert problem.value.endswith("...")


def test_problems_found_later_know_their_line() -> None:
    loaded = parse_document(GOOD, "etc/policy.yaml", Document)
    later = loaded.problem(("pools", "offload", "floor"), "is too much for this node", "lower it")
    unwritten = loaded.problem(("pools", "offload", "ceiling"), "is too much")
    error = loaded.error(later, unwritten)
    assert [str(problem) for problem in error.problems] == [
        "etc/policy.yaml:4: pools.offload.ceiling: is too much",
        "etc/policy.yaml:5: pools.offload.floor: is too much for this node; lower it",
    ]


def test_load_document(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("\ufeff" + GOOD, "utf-8")
    loaded = load_document(path, Document)
    assert loaded.path == path
    assert loaded.value.mode == "off"


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        (b"mode: act\nname: \xff\n", 2, "the byte 0xFF is not UTF-8; save the file as UTF-8"),
        (b"#" * (2**20 + 5), 0, "is larger than 1MiB"),
        (b"#" * (2**20 - 1) + "üüü".encode(), 0, "is larger than 1MiB"),
    ],
)
def test_bad_file(tmp_path: Path, content: bytes, line: int, says: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_document(path, Document)
    assert caught.value.problems[0].line == line
    assert says in str(caught.value)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: there is no such file"):
        load_document(tmp_path / "none.yaml", Document)
    with pytest.raises(ConfigError, match="is a folder; name a file"):
        load_document(tmp_path, Document)


@pytest.mark.parametrize(
    "text", ["3", "-3", "1.5", "1e3", "true", "False", "null", "~", "", "10%", "30s", "off", "0x1f"]
)
def test_a_scalar_reads_as_it_would_in_a_document(text: str) -> None:
    assert read_scalar(text) == read_tree(f"key: {text}\n", "x.yaml").value["key"]


def test_a_scalar_is_never_more_than_one_value() -> None:
    for text in ("[1, 2]", "{a: 1}", "&a x", "9" * 50, "1\nb: 2"):
        assert read_scalar(text) == text
