"""What a service manager hears of a real node, from its start to its reload."""

from __future__ import annotations

import signal

import pytest
from notify_socket import NotifySocket
from serve_process import ServeProcess, until

pytestmark = pytest.mark.engine


def test_the_start_asks_for_time_and_ends_in_ready(
    node: ServeProcess, notified: NotifySocket
) -> None:
    assert "Starting the engine" in notified.having("STATUS")[0]
    assert notified.place("EXTEND_TIMEOUT_USEC") < notified.place("READY")
    assert node.url in notified.messages[notified.place("READY")]["STATUS"]


def test_ticks_of_a_serving_node_feed_the_watchdog(
    node: ServeProcess, notified: NotifySocket
) -> None:
    before = len(notified.having("WATCHDOG"))
    until("the watchdog is fed", lambda: len(notified.having("WATCHDOG")) > before)
    assert notified.place("WATCHDOG") > notified.place("EXTEND_TIMEOUT_USEC")


def test_a_stopped_engine_is_not_ready_and_starves_the_watchdog_until_it_is_continued(
    node: ServeProcess, notified: NotifySocket
) -> None:
    engine = node.engine()
    until("the watchdog is fed", lambda: notified.having("WATCHDOG"))
    with node.control_http() as control:
        changes = {"actor": "test", "key": "stale_after", "value": "1s", "for_s": None}
        assert control.post("/v1/policy/set", json=changes).status_code == 200
        assert control.get("/readyz").status_code == 200
    engine.send_signal(signal.SIGSTOP)
    try:
        until("reports stop", lambda: node.status().observed.engine.report_age_s > 1.5)  # type: ignore[union-attr]
        hungry = len(notified.having("WATCHDOG"))
        until("reports are old", lambda: node.status().observed.engine.report_age_s > 4)  # type: ignore[union-attr]
        assert len(notified.having("WATCHDOG")) == hungry
        with node.control_http() as control:
            unready = control.get("/readyz")
            assert unready.status_code == 503
            assert "the engine reported" in unready.json()["error"]["message"]
            assert control.get("/healthz").status_code == 200
        assert node.status().stalled is None, "without a report nobody knows that it stands still"
    finally:
        engine.send_signal(signal.SIGCONT)
    until("the watchdog is fed again", lambda: len(notified.having("WATCHDOG")) > hungry)
    with node.control_http() as control:
        until("the node is ready again", lambda: control.get("/readyz").status_code == 200)
        undo = {"actor": "test", "key": "stale_after"}
        assert control.post("/v1/policy/unset", json=undo).status_code == 200


def test_a_reload_by_signal_is_framed(node: ServeProcess, notified: NotifySocket) -> None:
    before = len(notified.having("READY"))
    node.signal(signal.SIGHUP)
    until("the reload has ended", lambda: len(notified.having("READY")) > before)
    assert notified.having("RELOADING")
