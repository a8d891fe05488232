"""`hisparsed simulate`: policies as written, figures as printed, files as documented."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib.figure import Figure
from small import MIB, call, measured, sample, small_node
from typer.testing import CliRunner, Result

from hisparsed.cli.app import app
from hisparsed.errors import UserError
from hisparsed.policy.problems import ConfigError
from hisparsed.simulate.command import begin_folder, check_folder
from hisparsed.simulate.policies import choose_policy, sweep_policies
from hisparsed.simulate.report import HEADS, draw_hits, results_text, rows
from hisparsed.simulate.results import (
    CallTimes,
    Limits,
    Measures,
    PolicyResult,
    after_change,
    error_text,
    paired,
    quantile,
    scale_error,
    summarise,
)

WAITS = (range(1, 61), range(200, 230))


def tree(spec: str) -> Any:
    text = choose_policy(spec).text
    assert text is not None
    return yaml.safe_load(text)


def test_a_policy_is_written_with_changes_of_its_keys() -> None:
    changed = tree("policy,hot.min=1.5,levers.admission.mode=off")
    assert changed["hot"]["min"] == 1.5
    assert changed["levers"]["admission"]["mode"] == "off"


def test_a_fixed_split_is_one_word() -> None:
    fixed = tree("policy,pools.hisparse=97%")
    assert fixed["rebalance"]["strategy"] == "fixed"
    assert fixed["pools"]["hisparse"]["start"] == pytest.approx(0.97)
    assert choose_policy("stock,pools.hisparse=90%").hisparse_share == pytest.approx(0.9)


def test_a_sweep_steps_from_first_to_last() -> None:
    names = [one.name for one in sweep_policies("policy", "pools.hisparse=60%..75%:5%")]
    assert names == [f"policy,pools.hisparse={share}%" for share in (60, 65, 70, 75)]
    listed = sweep_policies("policy", "hot.start=1.0|1.5")
    assert [one.name for one in listed] == ["policy,hot.start=1.0", "policy,hot.start=1.5"]


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("nowhere", UserError, "^--policy nowhere: 'nowhere' is not known.*stock"),
        ("missing.yaml", UserError, "no file missing.yaml"),
        ("policy,hot", UserError, "KEY=VALUE"),
        ("policy,hot.nothing=1", ConfigError, "hot.nothing"),
        ("stock,hot.min=1", UserError, "stock vLLM has no hot.min"),
        ("policy,pools.hisparse=many", UserError, "'many' is not a share"),
        ("policy,tick.a=1", UserError, "--policy policy,tick.a=1: tick.a is below tick"),
        ("policy,hot=off,hot.min=1", UserError, "hot.min is below hot, which is a value"),
        ("standard,prefill.reads=20%", UserError, "without HiSparse has no prefill.reads"),
        ("policy,prefill.reads=2", UserError, "'2' is not a share"),
        ("standard,copies=8", UserError, "without HiSparse has no copies; host.budget and"),
        ("standard,pools.hisparse=50%", UserError, "without HiSparse has no pools.hisparse"),
    ],
)
def test_a_wrong_policy_says_what_is_right(spec: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        choose_policy(spec)


@pytest.mark.parametrize(
    "sweep",
    [
        *("pools.hisparse=60%..90%", "pools.hisparse=90%..60%:5%", "pools.hisparse=x..90%:5%"),
        *("pools.hisparse", "pools.hisparse=60%|x", "copies=0|1", "tick.a=1|2", "hot.nothing=1"),
    ],
)
def test_a_wrong_sweep_names_its_option(sweep: str) -> None:
    with pytest.raises((UserError, ConfigError), match=r"^--sweep: "):
        sweep_policies("policy", sweep)


def result(measures: Measures, scale: Fraction = Fraction(1)) -> PolicyResult:
    limits = Limits(ttft_s=2.0, itl_s=0.1)
    return summarise("p", 8, 0, measures, scale=scale, copy_bandwidth=1000.0, limits=limits)


def test_figures_count_what_finished_after_the_warm_up() -> None:
    found = result(measured(call(0, 1, 5), call(20, 21, 22), call(20, 21, 22, "b", cached=0)))
    assert (found.calls, found.sessions) == (2, 2)
    assert found.calls_per_hour == pytest.approx(72)
    assert (found.prefix_hit_tokens, found.recomputed_tokens) == (60, 140)
    assert found.throughput == pytest.approx(10)
    assert found.occupancy == 2
    assert found.load == pytest.approx(0.5)
    assert found.link_use == pytest.approx(0.1)


def test_a_good_call_keeps_both_limits() -> None:
    slow_start, slow_tokens = call(20, 23, 24), call(20, 21, 23)
    assert result(measured(call(20, 21, 22), slow_start, slow_tokens)).goodput == pytest.approx(36)


def test_a_scaled_node_counts_for_the_whole() -> None:
    whole, part = (result(measured(call(20, 21, 22)), Fraction(1, n)) for n in (1, 4))
    for name in ("calls_per_hour", "throughput", "goodput", "occupancy", "link_use"):
        assert getattr(part, name) == pytest.approx(4 * getattr(whole, name))
    assert part.calls == whole.calls


def test_calls_are_held_against_the_same_ones_of_the_first_policy() -> None:
    base = measured(call(20, 24, 30), call(20, 21, 30, "b"), call(20, 99, 100, "only there"))
    own = measured(call(20, 22, 30), call(20, 21, 30, "b"), call(20, 80, 90, "only here"))
    found = paired(result(own), own, base)
    assert found.paired_calls == 2
    assert (found.paired_ttft_p99_s, found.base_ttft_p99_s) == (2, 4)


def test_the_same_call_counts_though_it_ended_before_this_policy_was_measured() -> None:
    base = measured(call(20, 24, 30), call(1, 2, 5, "early there"))
    own = measured(call(2, 5, 6), call(20, 21, 30, "early there"))
    found = paired(result(own), own, base)
    assert (found.paired_calls, found.paired_ttft_p99_s, found.base_ttft_p99_s) == (1, 3, 4)


def test_a_change_is_over_when_the_split_has_arrived() -> None:
    shares = [(1.0, 10), (50.0, 10), (60.0, 20), (70.0, 30), (500.0, 30)]
    samples = [
        sample(at_s, offload_blocks=blocks, hisparse_blocks=100 - blocks) for at_s, blocks in shares
    ]
    measures = Measures(0.0, 530.0, calls=[call(1, 2, 340), call(1, 2, 351)], samples=samples)
    found = after_change(result(measures), measures, 50.0, 0.5)
    assert found.settled_s == 10
    assert found.recovered_calls_per_hour == pytest.approx(2 * 3600 / 180)
    short = Measures(0.0, 340.0, calls=measures.calls, samples=samples)
    assert after_change(found, short, 50.0, 0.5) == found


def test_failed_calls_are_counted_apart() -> None:
    failed = call(20, 21, 22)
    failed.failed = True
    found = result(measured(failed))
    assert (found.calls, found.failed) == (0, 1)


def test_quantiles_of_ascending_values() -> None:
    assert [quantile([1, 2, 3, 4], share) for share in (0.0, 0.5, 0.99)] == [1, 3, 4]
    assert quantile([], 0.5) == 0


def test_waits_of_several_seeds_are_over_all_their_calls() -> None:
    seeds = [measured(*(call(20, 20 + wait, 300, str(wait)) for wait in waits)) for waits in WAITS]
    found = [
        paired(result(one).model_copy(update={"seed": seed}), one, one)
        for seed, one in enumerate(seeds)
    ]
    row = dict(zip(HEADS, rows(found)[0], strict=True))
    assert (row["TTFT p50"], row["p99"]) == ("46.0s", "229s")
    assert row["p99 of both"] == "229s / 229s of 90"


def test_a_call_without_a_token_at_the_end_is_told_by_its_wait() -> None:
    waiting = CallTimes("b", 0, 100, 11, 70.0)
    assert result(measured(call(20, 21, 22), waiting)).unserved_s == pytest.approx(40)
    assert result(measured(call(20, 21, 22))).unserved_s == 0


def test_nothing_finished_and_nowhere_to_reach_are_no_figures() -> None:
    empty = sample(10.0, offload_reach_tokens=0), sample(110.0, offload_reach_tokens=0)
    found = result(Measures(10.0, 110.0, samples=list(empty)))
    assert (found.ttft_p50_s, found.ttft_p99_s, found.itl_p50_s, found.load) == (None,) * 4
    row = dict(zip(HEADS, rows([found])[0], strict=True))
    assert [row[head] for head in ("TTFT p50", "p99", "ITL", "load", "hit")] == ["-"] * 5


def test_the_table_joins_seeds_and_shows_their_range() -> None:
    one = result(measured(call(20, 21, 22)))
    other = one.model_copy(update={"seed": 1, "calls_per_hour": 72.0})
    text = results_text([one, other])
    assert len(text.splitlines()) == 2
    assert "36-72" in text


def test_a_narrow_terminal_gets_every_column_below_each_other() -> None:
    one = result(measured(call(20, 21, 22)))
    other = one.model_copy(update={"name": "policy," + "hot.max=2," * 10})
    lines = results_text([one, other], 60).splitlines()
    # Names have their own lines; the terminal wraps longer text.
    assert lines[:2] == [f"  1  {one.name}", f"  2  {other.name}"]
    assert max(map(len, lines[2:])) <= 60
    heads = " ".join(line for line in lines[2:] if "#" in line)
    assert all(head in heads for head in HEADS[1:])
    assert results_text([one, other], 1000) == results_text([one, other])


def test_a_run_of_seconds_has_a_plot_of_its_hits() -> None:
    samples = [sample(float(at), prompt_tokens=at * 10, hit_tokens=at * 5) for at in range(1, 21)]
    figure = Figure()
    axes = figure.subplots()
    draw_hits(axes, {"run": Measures(0.0, 20.0, samples=samples)})
    assert [list(line.get_ydata()) for line in axes.get_lines()] == [[50.0] * 9]


def test_the_error_of_a_scale_is_relative_to_the_whole() -> None:
    whole = result(measured(call(20, 21, 22)))
    part = whole.model_copy(update={"calls_per_hour": 40.0, "prefix_hit_tokens": 80})
    error = scale_error(part, whole)
    assert error.calls_per_hour == pytest.approx(40 / 36 - 1)
    assert error.throughput == 0
    assert "calls +11%" in error_text(error)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scale", "2"], "--scale: 2 is more than the whole node"),
        (["--for", "soon"], "--for: 'soon' is not right"),
        (["--node", "9xh200"], "'9xh200' is not known"),
        (["--host-budget", "much"], "--host-budget"),
        (["--load", "0", "--for", "10s"], "--load: 0"),
        (["--load", "nan", "--for", "10s"], "--load: nan"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--misses", "worse"], "--misses: 'worse' is not a factor"),
        (["--union", "x0"], "--union: 'x0' is not a factor"),
    ],
)
def test_wrong_options_are_told_before_anything_runs(arguments: list[str], message: str) -> None:
    assert message in str(command(*arguments).exception)


def files(folder: Path) -> tuple[str, str]:
    """A node with room for a half of it, and a trace of chat."""
    node, trace = folder / "node.yaml", folder / "chat.jsonl"
    described = small_node(gpu={"kv_memory": 64 * MIB})
    node.write_text(yaml.safe_dump(described.model_dump(mode="json")))
    lines = [
        {
            "timestamp": number * 500,
            "input_length": 700,
            "output_length": 40,
            "hash_ids": [number % 5, 100 + number],
        }
        for number in range(40)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(node), str(trace)


@pytest.mark.engine
def test_json_plots_report_and_journal_of_two_policies(tmp_path: Path) -> None:
    node, trace = files(tmp_path)
    out = tmp_path / "out"
    found = command(
        *("--node", node, "--trace", trace, "--for", "20s", "--warmup", "5s"),
        *("--policy", "stock", "--policy", "policy", "--scale", "1", "--json", "--out", str(out)),
    )
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    assert [one["name"] for one in document["policies"]] == ["stock", "policy"]
    keys = {"sessions", "prefix_hit_tokens", "recomputed_tokens", "goodput", "throughput"}
    assert keys | {"preemptions", "occupancy", "moves"} <= document["policies"][0].keys()
    assert all(one["calls"] > 10 for one in document["policies"])
    (part,) = document["samples"]
    assert part["part_seen"] == part["whole_seen"] > 0.3
    assert json.loads((out / "results.json").read_text()) == document
    names = ("pools", "reach", "hits", "concurrency", "interactivity")
    assert all((out / f"{name}.png").read_bytes()[:4] == b"\x89PNG" for name in names)
    report = (out / "report.html").read_text()
    assert "of the prompt blocks were seen before" in report
    assert report.count("data:image/png;base64,") == len(names)
    assert "http" not in report
    assert (out / "journal-1" / "journal.sqlite").is_file()


@pytest.mark.engine
@pytest.mark.long
def test_the_error_of_a_scale_is_measured_when_asked(tmp_path: Path) -> None:
    node, trace = files(tmp_path)
    options = ["--node", node, "--trace", trace, "--for", "20s", "--scale", "1/2"]
    found = command(*options, "--check-scale", "15s", "--policy", "stock")
    assert found.exit_code == 0, found.output
    assert "Against the whole node over the same time, stock: calls" in found.stdout
    assert "not measured" in command(*options, "--policy", "stock").stdout


def written(folder: Path, runs: int = 2) -> list[Path]:
    """As a run of this command leaves it."""
    check_folder(folder)
    journals = begin_folder(folder, [f"policy {number}" for number in range(runs)])
    made = [journal for journal in journals if journal is not None]
    for journal in made:
        journal.mkdir()
        (journal / "journal.sqlite").write_text("ticks")
    for name in ("results.json", "report.html", "pools.png"):
        (folder / name).write_text("of this run")
    return made


def everything(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_a_folder_says_which_journal_is_whose(tmp_path: Path) -> None:
    written(tmp_path / "new" / "out")
    lines = (tmp_path / "new" / "out" / "journals.txt").read_text().splitlines()
    assert lines[1:] == ["journal-0  policy 0", "journal-1  policy 1"]


def test_a_run_without_a_journal_claims_none(tmp_path: Path) -> None:
    check_folder(tmp_path)
    assert begin_folder(tmp_path, [None, "policy"]) == [None, tmp_path / "journal-1"]
    (tmp_path / "journal-0").mkdir()
    with pytest.raises(UserError, match="journal-0 was not written by this command"):
        check_folder(tmp_path)


def test_used_again_it_keeps_nothing_of_the_run_before(tmp_path: Path) -> None:
    written(tmp_path, runs=3)
    (tmp_path / "notes.md").write_text("mine")
    check_folder(tmp_path)
    begin_folder(tmp_path, ["stock"])
    assert everything(tmp_path).keys() == {"notes.md", "journals.txt"}
    assert not list(tmp_path.glob("journal-*"))


@pytest.mark.parametrize(
    "strange",
    ["results.json", "report.html", "journals.txt", "journal-0/journal.sqlite", "journal-7/mine"],
)
def test_what_this_command_did_not_write_is_refused_and_stays(tmp_path: Path, strange: str) -> None:
    path = tmp_path / strange
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    with pytest.raises(UserError, match=r"--out: .* was not written by this command"):
        check_folder(tmp_path)
    assert everything(tmp_path) == {strange: "mine"}


def test_a_journal_beside_its_own_is_refused(tmp_path: Path) -> None:
    journals = written(tmp_path)
    (tmp_path / "journal-9").mkdir()
    with pytest.raises(UserError, match="journal-9 was not written by this command"):
        check_folder(tmp_path)
    (tmp_path / "journal-9").rmdir()
    (journals[0] / "notes.md").write_text("mine")
    with pytest.raises(UserError, match="journal-0 was not written by this command"):
        check_folder(tmp_path)


def test_a_list_that_points_elsewhere_removes_nothing(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "journal.sqlite").write_text("mine")
    out = tmp_path / "out"
    written(out)
    with (out / "journals.txt").open("a") as file:
        file.write("../other  policy\n")
    check_folder(out)
    begin_folder(out, ["stock"])
    assert everything(other) == {"journal.sqlite": "mine"}


def test_what_is_no_folder_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "below", Path("/proc/x/y")):
        with pytest.raises(UserError, match=f"--out: {path} cannot be a folder"):
            check_folder(path)


def test_a_folder_in_the_place_of_the_report_is_told(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "report.html").unlink()
    (tmp_path / "report.html").mkdir()
    with pytest.raises(UserError, match=r"report\.html is not a file; move it"):
        check_folder(tmp_path)
