"""Which policy controls a run: `--policy` and `--sweep` as documents, and stock vLLM next to them.

A policy is written NAME or NAME,KEY=VALUE,...: a shipped policy, a file, `stock` or `standard`. The
keys are those of the policy document. `pools.hisparse=75%` stands for a split that is fixed there;
`copies=8`, `offload.policy | threshold | prompt_only`, `host.budget=1TiB` and `prefill.reads=20%`
belong to the node, not to the document. For a part of a node the sizes and counts of a document are
scaled; shares and times are not, and rates reach the policy as those of the whole node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from hisparsed.config.node import shipped_config
from hisparsed.errors import UserError
from hisparsed.plan.sizing import parse_budget
from hisparsed.policy.effective import parse_policy
from hisparsed.policy.schema_types import size_or_share
from hisparsed.policy.units import parse_bytes, parse_fraction
from hisparsed.policy.yaml_tree import read_tree

STOCK = "stock"
"""vLLM's own order, split and copies, with nothing that moves."""
STANDARD = "standard"
"""vLLM without HiSparse: all KV on the GPU, all of it offloaded to the host budget."""
FIXED_SPLIT = "pools.hisparse"
_MOST_STEPS = 200
_MOST_COUNT = 64


@dataclass(frozen=True, slots=True)
class Store:
    """vLLM's own options of the offload pool, how many copies of the indexer it keeps, and the
    memory that both pools share."""

    eviction: str = "lru"
    threshold: int = 0
    """A chunk is stored once it was offered so often; below 2, at once."""
    prompt_only: bool = False
    copies: int | None = None
    """``None``: as stock vLLM or this node has it."""
    host_budget: int | None = None
    """Bytes of the whole node; ``None``: those of the scenario."""
    prefill_reads: float | None = None
    """Share of a prompt's rows on the host that each GPU reads; ``None``: the description's."""


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """``text`` is the document to run under; ``None`` is stock vLLM with ``hisparse_share``,
    which is 0 without HiSparse."""

    name: str
    text: str | None
    hisparse_share: float = 0.75
    store: Store = Store()

    @property
    def hisparse(self) -> bool:
        return self.text is not None or self.hisparse_share > 0


def choose_policy(spec: str) -> PolicyChoice:
    """Raises ``UserError`` for what is not known, ``ConfigError`` for a wrong document."""
    return _choose(spec, f"--policy {spec}")


def choose_policies(specs: Sequence[str], sweep: str | None) -> list[PolicyChoice]:
    """All that are compared; ``sweep`` varies the first. Raises ``UserError`` for one twice."""
    found = [choose_policy(one) for one in specs]
    if sweep is not None:
        found += sweep_policies(specs[0], sweep)
    seen: set[str] = set()
    for one in found:
        if one.name in seen:
            option = "--policy" if specs.count(one.name) > 1 else "--sweep"
            raise twice(option, one.name)
        seen.add(one.name)
    return found


def twice(option: str, value: str) -> UserError:
    return UserError(
        f"{option}: {value} is there twice; name each once, and use --seeds to repeat it"
    )


def sweep_policies(base: str, sweep: str) -> list[PolicyChoice]:
    """``base`` once for each value of KEY=FIRST..LAST:STEP (shares) or KEY=A|B|C."""
    key, value = _pair("--sweep", sweep)
    specs = [f"{base},{key}={one}" for one in _values(value)]
    return [_choose(spec, f"--sweep: {spec}") for spec in specs]


def _choose(spec: str, place: str) -> PolicyChoice:
    """``place`` begins each error."""
    name, *settings = spec.split(",")
    store, pairs = _store(place, [_pair(place, setting) for setting in settings])
    if name == STOCK:
        return _stock(spec, place, pairs, store)
    if name == STANDARD:
        return _standard(spec, place, pairs, store)
    path = _document(name, place)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{place}: {path} cannot be read: {error}; name a policy file") from None
    if pairs:
        tree = read_tree(text, place).value
        for key, value in pairs:
            for own_key, own_value in _expanded(place, key, value):
                _put(place, tree, own_key, own_value)
        text = yaml.safe_dump(tree, sort_keys=False)
    parse_policy(text, place)
    return PolicyChoice(spec, text, store=store)


def _store(place: str, pairs: list[tuple[str, str]]) -> tuple[Store, list[tuple[str, str]]]:
    """What is of the offload pool itself, and the pairs that are not."""
    found, rest = Store(), []
    for key, value in pairs:
        if key == "offload.policy":
            if value not in ("lru", "arc"):
                raise UserError(f"{place}: offload.policy is lru or arc, not {value}")
            found = replace(found, eviction=value)
        elif key == "offload.threshold":
            found = replace(found, threshold=_count(place, key, value))
        elif key == "offload.prompt_only":
            if value not in ("true", "false"):
                raise UserError(f"{place}: {key} is true or false, not {value}")
            found = replace(found, prompt_only=value == "true")
        elif key == "copies":
            found = replace(found, copies=_count(place, key, value))
        elif key == "host.budget":
            found = replace(found, host_budget=parse_budget(f"{place}: {key}", value))
        elif key == "prefill.reads":
            found = replace(found, prefill_reads=_share(place, value))
        else:
            rest.append((key, value))
    return found, rest


def _count(place: str, key: str, value: str) -> int:
    if not value.isdecimal() or not 1 <= int(value) <= _MOST_COUNT:
        raise UserError(f"{place}: {key} is a whole number of 1 to {_MOST_COUNT}, not {value}")
    return int(value)


def _stock(spec: str, place: str, pairs: list[tuple[str, str]], store: Store) -> PolicyChoice:
    share = 0.75
    for key, value in pairs:
        if key != FIXED_SPLIT:
            raise UserError(
                f"{place}: stock vLLM has no {key}; {FIXED_SPLIT}, copies, host.budget, "
                "prefill.reads and offload.* are known"
            )
        share = _share(place, value)
    if share == 0:
        raise UserError(f"{place}: without a HiSparse pool write {STANDARD}")
    return PolicyChoice(spec, None, share, store)


def _standard(spec: str, place: str, pairs: list[tuple[str, str]], store: Store) -> PolicyChoice:
    unknown = [key for key, _ in pairs]
    if store.copies is not None:
        unknown.append("copies")
    if store.prefill_reads is not None:
        unknown.append("prefill.reads")
    if unknown:
        raise UserError(
            f"{place}: vLLM without HiSparse has no {unknown[0]}; host.budget and offload.* are "
            "known"
        )
    return PolicyChoice(spec, None, 0.0, store)


def _document(name: str, place: str) -> Path:
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UserError(f"{place}: there is no file {name}")
        return path
    for shipped in (f"{name}.yaml", f"policies/{name}.yaml"):
        try:
            return shipped_config(shipped)
        except FileNotFoundError:
            continue
    folder = shipped_config("policy.yaml").parent / "policies"
    known = ["policy", STOCK, STANDARD, *sorted(path.stem for path in folder.glob("*.yaml"))]
    raise UserError(
        f"{place}: {name!r} is not known; name a .yaml file or one of {', '.join(known)}"
    )


def _pair(place: str, setting: str) -> tuple[str, str]:
    key, equals, value = setting.partition("=")
    if not (key and equals and value):
        raise UserError(
            f"{place}: {setting!r} is not right; write KEY=VALUE, such as pools.hisparse=75%"
        )
    return key, value


def _expanded(place: str, key: str, value: str) -> Iterator[tuple[str, Any]]:
    if key != FIXED_SPLIT:
        yield key, _value(place, value)
        return
    share = _share(place, value)
    yield "rebalance.strategy", "fixed"
    yield "pools.hisparse.start", share
    yield "pools.offload.start", None
    yield "pools.hisparse.floor", min(0.5, share)
    yield "pools.offload.floor", min(0.01, 1 - share)
    yield "pools.offload.ceiling", max(0.5, 1 - share)


def _value(place: str, text: str) -> Any:
    """As the document's own reader takes it, to which `off` is a word."""
    return read_tree(f"value: {text}", place).value["value"]


def _put(place: str, tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for depth, section in enumerate(sections, 1):
        found: object = tree.setdefault(section, {})
        if not isinstance(found, dict):
            above = ".".join(sections[:depth])
            raise UserError(
                f"{place}: {key} is below {above}, which is a value and no section; write "
                f"{above}=VALUE"
            )
        tree = found
    tree[last] = value


def _values(text: str) -> list[str]:
    if ".." not in text:
        return text.split("|")
    ends, _, step_text = text.partition(":")
    first_text, _, last_text = ends.partition("..")
    if not step_text:
        raise UserError(f"--sweep: {text!r} has no step; write FIRST..LAST:STEP, as 60%..95%:5%")
    first, last, step = (_share("--sweep", one) for one in (first_text, last_text, step_text))
    if step <= 0 or last < first:
        raise UserError(f"--sweep: {text!r} has no values; FIRST is at most LAST, STEP above 0")
    count = int((last - first) / step + 1e-9) + 1
    if count > _MOST_STEPS:
        raise UserError(f"--sweep: {text!r} has {count} values; {_MOST_STEPS} is the most")
    return [f"{(first + index * step) * 100:g}%" for index in range(count)]


def _share(place: str, text: str) -> float:
    try:
        return parse_fraction(text)
    except ValueError:
        raise UserError(
            f"{place}: {text!r} is not a share; write a percentage such as 75%"
        ) from None


_BOUNDS = ("floor", "ceiling", "start")
_SIZES = {
    *(f"pools.{pool}.{key}" for pool in ("hisparse", "offload") for key in _BOUNDS),
    "pools.reserve",
    "rebalance.dead_band.absolute",
}
"""Bytes where they are no shares."""
_COUNTS = {
    "watermark.value",
    "admission.max_running",
    "admission.max_waiting_sessions",
}
"""Whole numbers; a part of one is rounded up."""


def policy_text_of_part(policy: PolicyChoice, scale: Fraction) -> str | None:
    """The document for ``scale`` of the node; the same where it states nothing of that kind."""
    if policy.text is None or scale == 1:
        return policy.text
    tree: dict[str, Any] = read_tree(policy.text, policy.name).value
    changed = _scale_section(tree, "", scale)
    return yaml.safe_dump(tree, sort_keys=False) if changed else policy.text


def _scale_section(section: dict[str, Any], prefix: str, scale: Fraction) -> bool:
    """In place; whether anything changed."""
    changed = False
    for name, value in section.items():
        key = f"{prefix}{name}"
        if key == "schedules":
            for entry in value or ():
                if isinstance(entry.get("set"), dict):
                    changed |= _scale_section(entry["set"], "", scale)
        elif isinstance(value, dict):
            changed |= _scale_section(value, f"{key}.", scale)
        else:
            scaled = _scaled_value(key, value, scale)
            changed |= scaled != value
            section[name] = scaled
    return changed


def _scaled_value(key: str, value: Any, scale: Fraction) -> Any:
    if key in _COUNTS and isinstance(value, int):
        return math.ceil(value * scale)
    if key in _SIZES and value is not None and size_or_share(value) == "size":
        return f"{math.floor(parse_bytes(value) * scale)}B"
    return value
