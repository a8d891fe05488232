"""Which values are an engine's, and that they are known again after a restart of the daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hisparsed.config.machine import NodeKind
from hisparsed.config.node import NodeConfig
from hisparsed.node.engine.records import ENGINE_FILE, EngineRecord
from hisparsed.node.engine.values import DAEMON_KEYS, EngineValues, multiplier_key, values_from


def config(**changes: Any) -> NodeConfig:
    return NodeConfig.model_validate({"node": "reference", "host_budget": "24MiB", **changes})


def values(most: float = 4.0, **changes: Any) -> EngineValues:
    return EngineValues(config(**changes), most)


def test_every_key_of_the_document_is_the_engine_s_or_the_daemon_s() -> None:
    assert set(NodeConfig.model_fields) >= DAEMON_KEYS


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"host_budget": "32MiB"}, "host_budget"),
        ({"reference": {"gpu_blocks": 700}}, "reference.gpu_blocks"),
        ({"engine_args": {"seed": 3}}, "engine_args"),
        ({"frontend_args": {"response_role": "model"}}, "frontend_args"),
    ],
)
def test_what_the_engine_is_started_with_is_a_change(changes: dict[str, Any], key: str) -> None:
    (change,) = values(**changes).changes_from(values())
    assert change.key == key
    assert values(**changes).digest() != values().digest()


def test_a_default_that_is_written_out_is_the_same_value() -> None:
    written = {"gpu_blocks": config().reference.gpu_blocks}
    assert values(reference=written).digest() == values().digest()


def test_a_larger_hot_buffer_is_a_change() -> None:
    (change,) = values(5.0).changes_from(values(4.0))
    assert (change.key, change.running, change.wanted) == ("hot.max", "4", "5")
    assert values(5.0).digest() != values(4.0).digest()


@pytest.mark.parametrize(
    ("kind", "kernels", "key"),
    [
        ("cuda", "vllm", "hot.start"),
        ("cuda", "auto", "hot.start"),
        ("cuda", "hisparsed", "hot.max"),
        ("reference", "vllm", "hot.max"),
    ],
)
def test_the_pending_key_is_the_one_that_the_node_sizes_hot_buffers_by(
    kind: NodeKind, kernels: str, key: str
) -> None:
    document = config(node="auto", model="m", cuda={"kernels": kernels})
    key_of = multiplier_key(document, kind)
    wanted = EngineValues(document, 5.0, multiplier_key=key_of).within(document)
    (change,) = wanted.changes_from(EngineValues(document, 4.0))
    assert (change.key, change.running, change.wanted) == (key, "4", "5")


def test_what_proved_kernels_would_get_is_a_value_too(tmp_path: Path) -> None:
    before, now = (EngineValues(config(), 4.0, proved) for proved in (8.0, 9.0))
    (change,) = now.changes_from(before)
    assert (change.key, change.running, change.wanted) == ("hot.max", "8", "9")
    assert now.digest() not in (before.digest(), values(4.0).digest())
    EngineRecord(tmp_path).keep_good(now)
    assert EngineRecord(tmp_path).good(config()) == now
    with pytest.raises(ValueError, match="proved_multiplier"):
        values_from(now.document() | {"proved_multiplier": "9"}, config())


@pytest.mark.parametrize(
    "changes", [{"api": {"port": 8001}}, {"log": {"level": "debug"}}, {"drain_timeout": "9s"}]
)
def test_what_the_daemon_holds_is_left_to_its_own_restart(changes: dict[str, Any]) -> None:
    assert values(**changes).changes_from(values()) == ()
    assert values(**changes).digest() == values().digest()
    (left,) = values(**changes).left_for_daemon(values())
    assert left.key.startswith(next(iter(changes)))
    assert values(**changes).within(config()).config == config()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"disaggregation": {"role": "decode", "timeout": "3s"}},
        {"reference": {"gpu_blocks": 700}, "engine_args": {"seed": 3}},
    ],
)
def test_values_are_the_same_after_a_restart(tmp_path: Path, changes: dict[str, Any]) -> None:
    EngineRecord(tmp_path).keep_good(values(**changes))
    again = EngineRecord(tmp_path).good(config(api={"port": 8001}))
    assert again is not None
    assert again.digest() == values(**changes).digest()
    assert again.config.api.port == 8001, "the daemon's own come from its document"
    assert (tmp_path / ENGINE_FILE).stat().st_mode & 0o777 == 0o640


def test_values_quarantined_are_known_by_what_they_say(tmp_path: Path) -> None:
    record = EngineRecord(tmp_path)
    record.keep_good(values())
    record.quarantine(values(host_budget="32MiB"), "refused", 5.0)
    later = EngineRecord(tmp_path)
    assert later.is_quarantined(values(host_budget="32MiB", api={"port": 8001}))
    assert not later.is_quarantined(values(host_budget="48MiB"))
    assert later.quarantined is not None
    assert (later.quarantined.error, later.quarantined.at_unix_s) == ("refused", 5.0)
    assert later.good(config()) is not None


def test_values_that_serve_after_all_are_no_longer_quarantined(tmp_path: Path) -> None:
    record = EngineRecord(tmp_path)
    record.quarantine(values(), "refused", 5.0)
    record.keep_good(values(host_budget="32MiB"))
    assert record.is_quarantined(values()), "others served"
    record.keep_good(values())
    assert EngineRecord(tmp_path).quarantined is None


@pytest.mark.parametrize("text", ["", "{", '{"version": 2}', '{"version": 1, "good": {"a": 1}}'])
def test_a_damaged_record_knows_nothing_and_stops_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / ENGINE_FILE).write_text(text)
    record = EngineRecord(tmp_path)
    assert record.good(config()) is None
    record.keep_good(values())
    assert EngineRecord(tmp_path).good(config()) is not None


def test_a_record_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / f"{ENGINE_FILE}.new").mkdir()
    record = EngineRecord(tmp_path)
    record.keep_good(values())
    assert record.good(config()) is not None, "this daemon knows it"


def test_what_is_not_of_this_version_is_refused() -> None:
    with pytest.raises(ValueError, match="missing"):
        values_from({"config": {}}, config())
    with pytest.raises(ValueError, match="host_budget"):
        values_from({"config": {}, "max_multiplier": 4}, config())
