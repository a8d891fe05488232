"""The table of requests on a real engine: who runs, who waits, what each holds, and no text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conversations import (
    EngineShape,
    build_engine,
    converse,
    core_of,
    make_conversations,
    report,
)

from hisparsed.engine.plugin import control
from hisparsed.engine.request_table import request_table

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Report and table between the steps of a run under pressure, both of the same moment."""
    engine = build_engine(tmp_path_factory.mktemp("requests"), EngineShape(gpu_blocks=300))
    seen: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def between_steps(step: int) -> None:
        if step % 3 == 0:
            seen.append((report(engine), control(core_of(engine), "requests", {})))

    converse(engine, make_conversations(14, 2, 200, 40, 16, seed=4), between_steps)
    return seen


def rows(table: dict[str, Any], state: str) -> list[dict[str, Any]]:
    return [row for row in table["rows"] if row["state"] == state]


def test_it_agrees_with_the_report_of_the_same_moment(tables: Any) -> None:
    assert any(told["requests"]["waiting"] for told, _ in tables)
    for told, table in tables:
        requests = told["requests"]
        running = rows(table, "running")
        assert len(running) == requests["running"] == table["running"]
        for kind in ("full", "mixed", "none"):
            assert sum(row["residency"] == kind for row in running) == requests[kind]
        assert len(table["rows"]) == requests["running"] + requests["waiting"]
        assert table["omitted"] == 0


def test_hot_rows_stay_within_their_capacity(tables: Any) -> None:
    held = [row for _, table in tables for row in table["rows"] if row["hot_capacity_rows"]]
    assert held
    for row in held:
        assert 0 <= row["hot_rows"] <= row["hot_capacity_rows"]
        assert row["references"] >= row["resident"] + row["hits"]
    assert any(row["hits"] and row["loads"] for row in held)


def test_shares_of_residency_fit_its_name(tables: Any) -> None:
    shares = {"full": set(), "mixed": set(), "none": set()}  # type: dict[str, set[float]]
    for _, table in tables:
        for row in rows(table, "running"):
            shares[row["residency"]].add(row["resident_share"])
    assert shares["full"] == {1.0}
    assert shares["mixed"]
    assert all(0 < share < 1 for share in shares["mixed"])


def test_a_waiting_request_holds_nothing(tables: Any) -> None:
    waiting = [row for _, table in tables for row in rows(table, "waiting")]
    assert waiting
    assert {row["hot_capacity_rows"] for row in waiting} == {0}
    assert min(row["age_s"] for row in waiting) >= 0


def test_resident_blocks_are_counted_in_the_report(tables: Any) -> None:
    for told, _ in tables:
        used = told["geometry"]["gpu_blocks_total"] - told["gpu"]["free_blocks"]
        assert 0 <= told["gpu"]["resident_blocks"] + told["hot"]["leased_blocks"] <= used
    assert any(told["gpu"]["resident_blocks"] for told, _ in tables)


def test_it_is_bounded_and_holds_no_text(tables: Any) -> None:
    _, table = max(tables, key=lambda pair: len(pair[1]["rows"]))
    assert not {"prompt", "text", "tokens", "token_ids"} & set(table["rows"][0])
    assert len(json.dumps(table["rows"][0])) < 600


def test_more_requests_than_lines_are_counted() -> None:
    class Request:
        request_id, num_tokens, num_computed_tokens, num_preemptions = "r", 10, 0, 0

    class Scheduler:
        running, waiting = [Request()] * 4, [Request()] * 5

        def waited_s(self, request: object) -> float:
            return 1.0

    table = request_table(Scheduler(), [], {}, max_rows=6)
    assert [row.state for row in table.rows] == ["running"] * 4 + ["waiting"] * 2
    assert table.omitted == 3
