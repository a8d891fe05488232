"""Where the size of hot buffers matters: every corner of a map, in closed form.

    python -m tests.bench.multiplier_map [--node NAME] [--only TABLE] [docs/figures/multiplier.md]

Evaluates the corners (``multiplier_corners``) with every fixed size, lets the policy's law come to
rest in some of them (``multiplier_live``), and puts the tables into the document; the words between
the tables are written by hand. ``--simulate FOLDER`` runs chosen corners on the simulated node
(``multiplier_simulated``), minutes of CPU each; results that are in the folder are not run again,
and ``--data`` shows them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from hisparsed.config.node_description import NodeDescription, load_node_description
from hisparsed.policy.schema import Policy
from tests.bench.multiplier_corners import (
    FIRST,
    MIXES,
    USERS,
    WORTH,
    Corner,
    Setting,
    Sizes,
    evaluate,
    gain,
    mean,
    mixed,
    most_hidden,
    settings,
    single,
    singles_by,
    to_simulate,
    vllms,
)
from tests.bench.multiplier_live import (
    LiveNode,
    at_rest,
    knowing,
    shared_gain,
    shipped_policy,
)
from tests.bench.multiplier_model import ClosedForm
from tests.bench.multiplier_simulated import kept, simulate
from tests.bench.study import with_table

DOCUMENT = Path("docs/figures/multiplier.md")
_LAW_ANSWERS = (200, 20_000)
"""The law is run with these answers and held prefixes."""
_PHASE_S = 1800.0
"""For each of four corners in turn."""


def oracle_table(node: NodeDescription, corners: Sequence[Sizes]) -> str:
    """The gain of always knowing the corner, over sizes that know less and less."""
    real = [one for one in corners if possible(node, one.corner.setting)]
    every = single(corners)
    rules: list[tuple[str, Callable[[Sizes], float]]] = [
        (f"one size for all, {every:g}x", lambda _one: every),
        ("one size for each number of drafts", singles_by(corners, lambda one: one.setting.drafts)),
        ("one size for each node", singles_by(corners, lambda one: one.setting)),
        ("vLLM's own", lambda one: vllms(one.corner)),
    ]
    lines = [_row(["against", f"all {len(corners):,}", f"{len(real):,} that vLLM can be in"])]
    lines.append(_rule(3))
    for name, chosen in rules:
        lines.append(_row([name, _more(gain(corners, chosen)), _more(gain(real, chosen))]))
    return _lines(lines)


def possible(node: NodeDescription, setting: Setting) -> bool:
    """Whether vLLM can hide so much."""
    return setting.hidden <= most_hidden(node, setting.drafts)


def settings_table(node: NodeDescription, corners: Sequence[Sizes]) -> str:
    """Each node: its best single size and what knowing the traffic gains over it."""
    heads = ["drafts", "hidden", "misses", "vLLM can", "best size", "best of 80 % of the corners"]
    heads += ["oracle", "worst corner", "oracle over vLLM's", *MIXES]
    lines = [_row(heads), _rule(len(heads))]
    for setting, mine in by_setting(corners):
        if setting.spread:
            continue
        best = single(mine)
        sizes = sorted(one.best for one in mine)
        low, high = sizes[len(sizes) // 10], sizes[-1 - len(sizes) // 10]
        cells = [
            *(str(setting.drafts), f"{setting.hidden:.0%}", f"x{setting.misses:g}"),
            "yes" if possible(node, setting) else "no",
            *(f"{best:g}x", f"{low:g}x to {high:g}x"),
            _more(gain(mine, lambda _one, best=best: best)),  # type: ignore[misc]
            _more(1 / min(one.share(best) for one in mine) - 1),
            _more(gain(mine, lambda one: vllms(one.corner))),
        ]
        for name in MIXES:
            some = mixed(mine, name)
            cells.append(_more(gain(some, singles_by(some, lambda one: one.setting))))
        lines.append(_row(cells))
    return _lines(lines)


def by_setting(corners: Sequence[Sizes]) -> list[tuple[Setting, list[Sizes]]]:
    found: dict[Setting, list[Sizes]] = {}
    for one in corners:
        found.setdefault(one.corner.setting, []).append(one)
    return list(found.items())


def traffic_table(node: NodeDescription, corners: Sequence[Sizes]) -> str:
    """What the oracle gains over the node's own best size, by each property of the traffic."""
    real = [one for one in corners if possible(node, one.corner.setting)]
    own, own_real = (singles_by(one, lambda corner: corner.setting) for one in (corners, real))
    axes: list[tuple[str, Callable[[Corner], str]]] = [
        ("answer", lambda one: f"{one.traffic.answer:,}"),
        ("context", lambda one: f"{one.traffic.context // 1024}K"),
        ("users", lambda one: str(one.traffic.users) if one.traffic.users in USERS else "more"),
        ("first prompts", lambda one: f"{one.traffic.first:.0%}"),
        ("requests", lambda one: "differ" if one.setting.spread else "alike"),
    ]
    heads = ["property", "value", "oracle, all nodes", "oracle, vLLM can", "corners over 2 %"]
    lines = [_row(heads), _rule(len(heads))]
    for name, value_of in axes:
        for value in dict.fromkeys(value_of(one.corner) for one in corners):
            mine = [one for one in corners if value_of(one.corner) == value]
            some = [one for one in real if value_of(one.corner) == value]
            over = mean(one.share(own_real(one)) < 1 / (1 + WORTH) for one in some)
            cells = [name, value, _more(gain(mine, own)), _more(gain(some, own_real))]
            lines.append(_row([*cells, f"{over:.0%}"]))
    return _lines(lines)


def law_table(node: NodeDescription, corners: Sequence[Sizes]) -> str:
    """What the law reaches at rest, of the best fixed size, on the same corners of each node."""
    policy = shipped_policy()
    heads = ["drafts", "hidden", "misses", "users", "node's best size", "vLLM's own"]
    heads += ["law", "worst", "law that knows the wait", "worst", "shared by gain"]
    lines = [_row(heads), _rule(len(heads))]
    differing = {one.corner: one for one in corners if one.corner.setting.spread}
    for setting, mine in by_setting(corners):
        if setting.spread:
            continue
        form, best = ClosedForm(setting.of(node)), single(mine)
        unlike = Setting(setting.drafts, setting.hidden, setting.misses, 1.0)
        spread = ClosedForm(unlike.of(node))
        for users, some in _law_corners(mine).items():
            blind = [_law_share(form, policy, one) for one in some]
            sighted = blind
            if setting.hidden:
                knows = knowing(policy, form.node)
                sighted = [_law_share(form, knows, one) for one in some]
            gains = [
                shared_gain(
                    spread,
                    policy,
                    one.corner.traffic,
                    single([differing[Corner(unlike, one.corner.traffic)]]),
                )
                for one in some
            ]
            cells = [str(setting.drafts), f"{setting.hidden:.0%}", f"x{setting.misses:g}", users]
            cells += [_share([one.share(best) for one in some])]
            cells += [_share([one.share(vllms(one.corner)) for one in some])]
            for shares in (blind, sighted):
                cells += [_share(shares), f"{min(shares):.0%}"]
            lines.append(_row([*cells, _more(mean(gains) - 1)]))
    return _lines(lines)


def _law_corners(mine: Sequence[Sizes]) -> dict[str, list[Sizes]]:
    """By users: a few, and as many as fit the host."""
    some = [
        one
        for one in mine
        if one.corner.traffic.answer in _LAW_ANSWERS and one.corner.traffic.first == FIRST[0]
    ]
    few, more = (users for users in USERS if users)
    return {
        f"{few}": [one for one in some if one.corner.traffic.users == few],
        f"over {more}": [one for one in some if one.corner.traffic.users > more],
    }


def _law_share(form: ClosedForm, policy: Policy, one: Sizes) -> float:
    return at_rest(form, policy, one.corner.traffic) / one.calls[one.best]


def change_table(node: NodeDescription, corners: Sequence[Sizes]) -> str:
    """The law through four corners of half an hour each, against every single size."""
    heads = ["drafts", "hidden", "best single size", "law", "law that knows the wait"]
    heads += ["moves", "last move after a change"]
    lines = [_row(heads), _rule(len(heads))]
    for setting, mine in by_setting(corners):
        if setting.spread or setting.misses > 1:
            continue
        form, policy = ClosedForm(setting.of(node)), shipped_policy()
        phases = mixed(mine, list(MIXES)[-1])
        best = single(phases)
        ratios, last, moves = [], 0.0, 0
        for chosen in (policy, knowing(policy, form.node)):
            live, shares = LiveNode(form, chosen), []
            for phase in phases:
                calls = live.run(phase.corner.traffic, _PHASE_S) / _PHASE_S * 3600
                shares.append(calls / phase.calls[phase.best])
            ratios.append(mean(shares) / mean(one.share(best) for one in phases))
            moves = len(live.changes)
            last = max((at_s % _PHASE_S for at_s, _ in live.changes), default=0.0)
        cells = [str(setting.drafts), f"{setting.hidden:.0%}", f"{best:g}x"]
        cells += [f"{one:.1%} of it" for one in ratios]
        lines.append(_row([*cells, str(moves), f"{last:.0f} s"]))
    return _lines(lines)


def chosen_table(corners: Sequence[Sizes], chosen: Sequence[Sizes], data: Path | None) -> str:
    """The corners that are simulated, and what the simulated node made of them: tokens per second,
    next to those of the closed form."""
    heads = ["drafts", "hidden", "misses", "answer", "context", "users", "first", *_SIZES]
    heads += ["vLLM's / best", "node's / best", "law / best"]
    lines = [_row(heads), _rule(len(heads))]
    for one in chosen:
        setting, traffic = one.corner.setting, one.corner.traffic
        cells = [str(setting.drafts), f"{setting.hidden:.0%}", f"x{setting.misses:g}"]
        cells += [f"{traffic.answer:,}", f"{traffic.context // 1024}K", str(traffic.users)]
        cells.append(f"{traffic.first:.0%}")
        sizes = _sizes_to_run(corners, one)
        made = [kept(data, one.corner, size) for size in sizes]
        for size, found in zip(sizes[:-1], made, strict=False):
            calls = one.calls.get(float(size), 0.0)
            cells.append(_against(size, found, calls * traffic.answer / 3600))
        best = made[0]
        cells += [f"{found / best:.1%}" if found and best else "" for found in made[1:]]
        lines.append(_row(cells))
    return _lines(lines)


_SIZES = ("best size", "vLLM's own", "node's best size")


def _sizes_to_run(corners: Sequence[Sizes], one: Sizes) -> list[str]:
    """As ``_SIZES``, and the law."""
    mine = [other for other in corners if other.corner.setting == one.corner.setting]
    return [f"{size:g}" for size in (one.best, vllms(one.corner), single(mine))] + ["live"]


def _against(size: str, simulated: float | None, closed: float) -> str:
    if simulated is None:
        return f"{size}x: {closed:,.0f}"
    return f"{size}x: {closed:,.0f}, simulated {simulated / closed - 1:+.1%}"


TABLES: dict[str, Callable[[NodeDescription, Sequence[Sizes]], str]] = {
    "oracle": oracle_table,
    "settings": settings_table,
    "traffic": traffic_table,
    "law": law_table,
    "change": change_table,
    "chosen": lambda _node, corners: chosen_table(corners, to_simulate(corners), None),
}


def _share(shares: Sequence[float]) -> str:
    return f"{mean(shares):.1%}"


def _more(part: float) -> str:
    return f"{part:.1%}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return _row(["---"] * columns)


def _lines(lines: Sequence[str]) -> str:
    return "\n" + "\n".join(lines) + "\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the map of the multiplier.")
    parser.add_argument("--node", default="8xh200-glm-5.3", help="node description")
    parser.add_argument("--only", choices=TABLES, action="append", help="of the tables")
    parser.add_argument("--simulate", type=Path, metavar="FOLDER", help="run the chosen corners")
    parser.add_argument("--data", type=Path, help="folder with results of --simulate")
    parser.add_argument("document", nargs="?", type=Path, default=DOCUMENT)
    given = parser.parse_args()
    node = load_node_description(given.node)
    corners = evaluate(node, settings(node))
    chosen = to_simulate(corners)
    if given.simulate:
        for one in chosen:
            for size in _sizes_to_run(corners, one):
                simulate(node, one.corner, size, given.simulate)
    text = given.document.read_text("utf-8")
    for name in given.only or TABLES:
        if name == "chosen":
            table = chosen_table(corners, chosen, given.data or given.simulate)
        else:
            table = TABLES[name](node, corners)
        text = with_table(text, name, table)
    given.document.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
