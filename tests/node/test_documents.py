"""Three hundred mutated policies against a whole node: no traceback, and every view of each."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serve_process import NodeFiles, ServeProcess, hisparsed, policy_document, until
from streaming import complete

from tests.fuzz.mutate import Documents, every_key

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1800)]

DOCUMENTS = 300
PAGES = ("/v1/status", "/v1/policy", "/v1/decisions", "/v1/journal/events", "/v1/logs")


def test_no_document_breaks_a_node(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path / "node")
    full = tmp_path / "full.yaml"
    full.write_text(every_key(), encoding="utf-8")
    documents = iter(Documents([full, files.policy_path], random.Random(11)))
    node = ServeProcess(files)
    loaded = 0
    try:
        node.wait_until_ready()
        with node.control_http() as control:
            for number in range(DOCUMENTS):
                document = next(documents)
                files.policy_path.write_bytes(document)
                answer = control.post("/v1/policy/reload", json={"actor": "fuzz"})
                assert answer.status_code in (200, 422), (document, answer.text)
                assert "bug in the daemon" not in answer.text, document
                loaded += answer.status_code == 200
                for page in PAGES:
                    shown = control.get(page)
                    assert shown.status_code == 200, (document, shown.text)
                assert node.http.get("/metrics").status_code == 200
                if number % 50 == 0:
                    for words in (("top", "--once"), ("policy", "show"), ("status",), ("explain",)):
                        said = hisparsed(*words, "--socket", str(files.socket))
                        assert said.returncode == 0, (document, said.stderr)
        files.write_policy(policy_document(tick="200ms"))
        until("the watch has seen the good one", lambda: node.status().loop.tick_s == 0.2)
        assert 10 < loaded < DOCUMENTS
        assert complete(node.http, "hello", 4)["usage"]["completion_tokens"] == 4
        assert node.status().loop.failed_ticks == 0
        assert background(node) == {"file watch": 1.0}
        assert node.end() == 0, node.log_end()
        assert "Traceback" not in node.log()
        node.assert_nothing_left()
    finally:
        node.kill()


def background(node: ServeProcess) -> dict[str, float]:
    return {
        sample.labels["task"]: sample.value
        for family in text_string_to_metric_families(node.http.get("/metrics").text)
        for sample in family.samples
        if sample.name == "hisparsed_background_running"
    }
