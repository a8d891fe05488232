"""A state folder that 0.1.0 wrote is read on: at the start, and by explain, replay and top.

Names in its files are a promise. Where one has to change, read the old name too, or raise the
schema of the file; `tests/data/state-0.1.0/README.md` says how the folder came about.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner

from hisparsed.cli.app import app
from hisparsed.config.node import NodeConfig, load_node_config
from hisparsed.control.events import Broadcast, EventRecorder
from hisparsed.control.journal.journal import Journal, JournalWriter
from hisparsed.control.journal.records import (
    APPLIED_JSON,
    CONFIRMATION_JSON,
    DECISION_JSON,
    SNAPSHOT_JSON,
)
from hisparsed.control.journal.store import Query, tick_in_file
from hisparsed.control.live_policy import PolicySource
from hisparsed.control.operator import restore_overrides
from hisparsed.control.state_files import OverrideFile, TargetFile, with_kept_targets
from hisparsed.node.engine.records import EngineRecord, RestartFile
from hisparsed.node.engine.values import EngineValues
from hisparsed.policy.bounds import start_command
from hisparsed.policy.events import EventKind
from hisparsed.policy.signals import AdmissionOrder, AdmissionRules
from hisparsed.tui.journal_player import JournalPlayer
from hisparsed.tui.journal_reader import JournalReader
from hisparsed.tui.model import NodeModel

KEPT = Path(__file__).parents[1] / "data" / "state-0.1.0"
TICKS, EVENTS = 21, 21
END_UNIX_S = 1796091888.0
LAST_OF_FIRST_POLICY = 5
"""Ticks before an operator put anything above the document."""
COLUMNS: dict[str, TypeAdapter[Any]] = {
    "snapshot": SNAPSHOT_JSON,
    "decision": DECISION_JSON,
    "applied": APPLIED_JSON,
    "confirmed": CONFIRMATION_JSON,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy: documents, and the state folder that belongs to them."""
    return Path(shutil.copytree(KEPT, tmp_path / "node"))


@pytest.fixture
def state(folder: Path) -> Path:
    return folder / "state"


def document(path: Path) -> Any:
    return json.loads(path.read_bytes())


def rows(state: Path, columns: str, table: str = "ticks") -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(state / "journal.sqlite")) as database:
        return database.execute(f"SELECT {columns} FROM {table} ORDER BY id").fetchall()  # noqa: S608


def lost(kept: Any, read: Any, place: str = "") -> Iterator[str]:
    """Where ``read`` does not say what ``kept`` does; more than that it may say."""
    if isinstance(kept, dict) and isinstance(read, dict):
        for name, value in kept.items():
            yield from lost(value, read.get(name, "no such name"), f"{place}.{name}")
    elif isinstance(kept, list) and isinstance(read, list) and len(kept) == len(read):
        for index, value in enumerate(kept):
            yield from lost(value, read[index], f"{place}[{index}]")
    elif kept != read:
        yield f"{place}: {kept!r} is read as {read!r}"


def journal_of(state: Path, run: str) -> tuple[Journal, JournalWriter]:
    writer = JournalWriter(state, run=run, clock=lambda: 0.0, stamp=str, log=lambda _: None)
    return Journal(writer, run=run), writer


def source_at(folder: Path, unix_s: float) -> tuple[PolicySource, Journal]:
    """The policy as a daemon that starts at that time reads it."""
    source = PolicySource(folder / "policy.yaml", clock=lambda: 0.0, wall_clock=lambda: unix_s)
    journal, _ = journal_of(folder / "state", "new")
    recorder = EventRecorder(journal, Broadcast(), wall_clock=lambda: unix_s)
    restore_overrides(source, recorder, folder / "state")
    return source, journal


def explained(state: Path, *options: str) -> dict[str, Any]:
    words = ["explain", "--journal", str(state), "--last", "1000", "--json", *options]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


# --- at the start ---------------------------------------------------------------------


def test_values_that_operators_set_hold_until_their_time_is_over(folder: Path) -> None:
    source, journal = source_at(folder, END_UNIX_S + 60)
    assert [(one.key, one.value, one.actor) for one in source.overrides] == [
        ("hot.min", 3, "ann (as root)"),
        ("pools.offload.ceiling", "40%", "ann (as root)"),
    ]
    assert (source.overrides[0].expires_unix_s or 0) - source.overrides[0].set_unix_s == 3_600
    assert source.in_force.policy.hot.min == 3.0
    assert source.in_force.policy.pools.offload.ceiling == 0.4
    assert journal.recent_events(10) == [], "nothing was dropped or damaged"
    later, _ = source_at(folder, END_UNIX_S + 3_600)
    assert [one.key for one in later.overrides] == ["pools.offload.ceiling"]
    assert later.in_force.policy.hot.min == 1.0


def test_targets_are_taken_up_by_the_same_policy_on_the_same_node(folder: Path) -> None:
    state = folder / "state"
    source, _ = source_at(folder, END_UNIX_S)
    snapshot = SNAPSHOT_JSON.validate_json(rows(state, "snapshot")[-1][0])
    targets = TargetFile(state).load(source.active.content_hash, snapshot.geometry)
    assert targets is not None
    assert source.bind(snapshot.geometry) == ()
    policy = source.in_force.policy
    begun = with_kept_targets(
        start_command(policy, snapshot.geometry), targets, policy, snapshot.geometry
    )
    assert (begun.offload_target_blocks, begun.multiplier) == (235, 4.0)


def test_the_last_good_values_and_those_quarantined_are_known(folder: Path) -> None:
    daemon = load_node_config(folder / "hisparsed.yaml", memory_bytes=2**40).value
    kept = document(folder / "state" / "engine.json")
    record = EngineRecord(folder / "state")
    good = record.good(daemon)
    assert good is not None
    assert good.document() == kept["good"]
    assert (good.config.reference.gpu_blocks, good.max_multiplier) == (600, 4.0)
    assert record.quarantined is not None
    assert record.quarantined.error == kept["put_aside"]["error"]
    ten = {"reference": {**kept["good"]["config"]["reference"], "gpu_blocks": 10}}
    bad = NodeConfig.model_validate({"node": "reference", **kept["good"]["config"], **ten})
    assert record.is_quarantined(EngineValues(bad, good.max_multiplier)), "they are not tried again"
    assert not record.is_quarantined(good)


def test_restarts_for_a_stall_are_counted_on(state: Path) -> None:
    assert RestartFile(state).since(0.0) == [1796089000.25, 1796091000.5]


async def test_the_journal_is_written_on(state: Path) -> None:
    journal, writer = journal_of(state, "new")
    EventRecorder(journal, Broadcast(), wall_clock=lambda: END_UNIX_S).event(
        EventKind.STOPPED, "Now."
    )
    writer.write(list(journal._events))
    writer.close()
    assert (writer.health.error, writer.health.set_aside, writer.health.written) == (None, 0, 1)
    assert len(rows(state, "id", "events")) == EVENTS + 1
    assert len(await journal.decisions(Query(limit=1_000))) == 4 * TICKS


# --- names ----------------------------------------------------------------------------


@pytest.mark.parametrize("column", COLUMNS)
def test_every_name_in_the_journal_is_read(state: Path, column: str) -> None:
    found = [text for (text,) in rows(state, column)]
    assert len(found) == TICKS
    assert any(text != "null" for text in found)
    adapter = COLUMNS[column]
    for text in found:
        kept = json.loads(text)
        if column == "applied" and kept is not None:
            kept["command"]["watermark"] = kept["command"].pop("transition_watermark")
            assert kept["command"].pop("session_ttl_s") is None, "no daemon ever sent it"
        read = json.loads(adapter.dump_json(adapter.validate_json(text)))
        assert list(lost(kept, read)) == []


@pytest.mark.parametrize("watermark", [40, "default"])
def test_a_command_is_read_by_the_names_it_had(state: Path, watermark: int | str) -> None:
    kept = next(json.loads(text) for (text,) in rows(state, "applied") if text != "null")
    limits = {"order": "arrival", "ageing_s": 12.0, "oldest_share": 0.5, "max_running": 3}
    kept["command"] |= {"transition_watermark": watermark, "admission": limits}
    read = APPLIED_JSON.validate_json(json.dumps(kept))
    assert read is not None
    assert read.command.watermark == watermark
    assert read.command.admission == AdmissionRules(
        AdmissionOrder.ARRIVAL, 12.0, 3, oldest_share=0.5
    )


def test_no_name_in_the_small_files_has_changed(state: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.mkdir()
    OverrideFile(again).save(OverrideFile(state).load())
    kept = document(state / "targets.json")
    snapshot = SNAPSHOT_JSON.validate_json(rows(state, "snapshot")[-1][0])
    targets = TargetFile(state).load(kept["policy_hash"], snapshot.geometry)
    assert targets is not None
    TargetFile(again).save(kept["policy_hash"], snapshot.geometry, targets)
    for name in ("overrides.json", "targets.json"):
        assert list(lost(document(state / name), document(again / name))) == []


# --- explain, replay, top -------------------------------------------------------------


def test_explain_shows_every_tick_and_event(state: Path) -> None:
    found = explained(state, "--all")
    decisions, events = found["decisions"], found["events"]
    assert (len(decisions), len(events)) == (4 * TICKS, EVENTS)
    first = next(one for one in reversed(decisions) if one["lever"] == "split")
    assert (first["sequence"], first["code"], first["acts"]) == (2, "OffloadShortOfReach", True)
    assert (first["current"], first["wanted"], first["figures"]["need_blocks"]) == (61, 91, 221.0)
    last = next(one for one in decisions if one["lever"] == "split")
    assert (last["sequence"], last["code"], last["wanted"]) == (41, "InDeadBand", 235)
    assert (events[0]["kind"], events[-1]["kind"]) == ("stopped", "started")
    kinds = [one["kind"] for one in events]
    for kind, count in {
        "frozen": 2, "thawed": 1, "mode-set": 3, "value-set": 2, "engine-restarting": 2,
        "engine-quarantined": 1, "engine-ready": 2, "canary-recorded": 1, "pending-restart": 2,
    }.items():  # fmt: skip
        assert kinds.count(kind) == count, kind


def test_explain_finds_freezes_and_modes(state: Path) -> None:
    frozen = explained(state, "--all", "--code", "Frozen")["decisions"]
    assert [(one["tick"], one["lever"], one["cause"]) for one in frozen] == [
        (5, "split", "OffloadShortOfReach"),
        (4, "split", "OffloadShortOfReach"),
    ]
    advised = explained(state, "--all", "--code", "AdviseOnly")["decisions"]
    assert [(one["tick"], one["lever"], one["wanted"]) for one in advised] == [
        (7, "multiplier", 3.0),
        (6, "multiplier", 3.0),
    ]


def test_the_same_policy_decides_as_it_did_until_operators_changed_it(folder: Path) -> None:
    """Where the policy's laws are changed on purpose, other decisions here are not an error."""
    words = ["policy", "replay", str(folder / "state"), "--policy", str(folder / "policy.yaml")]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["ticks"], found["unreadable"], found["runs"]) == (TICKS, 0, 1)
    first = found["first"][0]
    assert (first["tick"], first["lever"]) == (LAST_OF_FIRST_POLICY + 1, "multiplier")
    assert {lever: one["recorded_moves"] for lever, one in found["levers"].items()} == {
        "split": 6, "multiplier": 1, "admission": 0, "watermark": 0,
    }  # fmt: skip


def test_a_tick_is_found_whole(state: Path) -> None:
    (run,) = {run for (run,) in rows(state, "run")}
    whole = tick_in_file(state / "journal.sqlite", 15, None, run=run)
    assert whole is not None
    assert whole["applied"]["command"]["multiplier"] == 3.0
    assert whole["confirmation"] == {"tick": 8, "differences": []}


def test_top_shows_the_recorded_node(state: Path) -> None:
    reader = JournalReader(state / "journal.sqlite")
    model = NodeModel("journal")
    player = JournalPlayer(reader, clock=lambda: 0.0).start(lambda update: model.apply(update, 0.0))
    assert (len(reader.ids), reader.damage) == (TICKS, None)
    for place, (text,) in enumerate(rows(state, "snapshot")):
        player.seek(reader.times[place])
        snapshot = json.loads(text)
        assert list(lost(snapshot, model.observed)) == []
        assert list(lost(derived(snapshot), model.derived)) == []
    levers = {one["lever"]: one for one in (model.status or {})["levers"]}
    assert levers["split"]["frozen"]
    assert not levers["multiplier"]["frozen"]
    assert levers["split"]["wanted"] == 235
    moves = {one["at_unix_s"] for one in model.decisions if one["acts"]}
    assert len(moves) == 6, "the move of both levers is one tick"
    assert len(model.events) == EVENTS - 1, "the last is after the last tick"
    reader.close()


def derived(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Figures computed from a recorded snapshot, by the names that 0.1.0 wrote."""
    geometry, hisparse, offload = (snapshot[one] for one in ("geometry", "hisparse", "offload"))
    block, tokens = geometry["host_block_bytes"], geometry["block_tokens"]
    chunk_tokens = geometry["offload_chunk_tokens"]
    in_use = hisparse["in_use_blocks"] * tokens
    return {
        "pools": {
            "budget_bytes": geometry["budget_blocks"] * block,
            "hisparse": {
                "capacity_bytes": hisparse["capacity_blocks"] * block,
                "target_bytes": hisparse["target_blocks"] * block,
                "in_use_bytes": hisparse["in_use_blocks"] * block,
                "cached_bytes": hisparse["cached_blocks"] * block,
                "reach_tokens": hisparse["capacity_blocks"] * tokens - in_use,
            },
            "offload": {
                "target_bytes": offload["target_blocks"] * block,
                "capacity_bytes": offload["lent_blocks"] * block,
                "in_use_bytes": offload["in_use_chunks"] * geometry["offload_chunk_bytes"],
                "reach_tokens": offload["capacity_chunks"] * chunk_tokens
                - max(offload["in_use_chunks"] * chunk_tokens, in_use),
            },
            "pending_bytes": snapshot["pending_blocks"] * block,
            "draining_bytes": snapshot["draining_blocks"] * block,
            "reserve_bytes": snapshot["reserve"]["blocks"] * block,
        },
    }
