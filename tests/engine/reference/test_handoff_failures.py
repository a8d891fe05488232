"""A prefix that does not arrive is computed: tokens are right, it is counted, nothing leaks."""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conversations import EngineShape, answer_of, ask, build_engine, finish, report, text
from handoff_pair import DECODE, PREFILL, Fault, FaultyRelay, Pair, pair

pytestmark = pytest.mark.engine

SHAPE = EngineShape(gpu_blocks=700)
ANSWER = 8
TOKENS = 700
PROMPT = text(TOKENS, seed=5)
GREETING = 60
ROWS_AT = GREETING
INDEX_AT = GREETING + TOKENS * 8 * 128
LAST_AT = INDEX_AT + TOKENS * 2 * 68 - 1
"""Bytes of the answer: in sparse-MLA rows, in indexer rows, near the end."""


@pytest.fixture(scope="module")
def on_one_node(folder: Path) -> list[int]:
    engine = build_engine(folder, SHAPE)
    ask(engine, "call", PROMPT, ANSWER)
    return answer_of(finish(engine)["call"])


@contextmanager
def nodes_of(folder: Path, *, lease_s: float = 60.0, timeout_s: float = 20.0) -> Iterator[Pair]:
    with pair(
        folder,
        SHAPE,
        SHAPE,
        replace(PREFILL, lease_s=lease_s),
        replace(DECODE, timeout_s=timeout_s),
    ) as nodes:
        yield nodes


def require_free(nodes: Pair) -> None:
    nodes.until(
        "all blocks are free",
        lambda: all(node.blocks_in_use() == (0, 0) for node in (nodes.prefill, nodes.decode)),
    )
    nodes.until("no offer is open", lambda: nodes.prefill.worker.open_offers == 0)


def require_computed_here(nodes: Pair, params: dict[str, Any], on_one_node: list[int]) -> None:
    answers = nodes.decoded({"call": PROMPT}, {"call": params}, ANSWER)
    assert answers["call"].tokens == on_one_node
    assert "fetched" not in nodes.decode.counts
    assert report(nodes.decode.engine)["progress"]["scheduled_tokens_total"] == TOKENS + ANSWER - 1


def failures_logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "was not fetched" in text]


STAGES = {"length": 0, "greeting": 9, "rows": ROWS_AT, "index": INDEX_AT, "end": LAST_AT}
QUICK = [("cut", "greeting"), ("cut", "rows"), ("flip", "index")]


@pytest.mark.parametrize(
    ("fault", "stage"),
    [
        pytest.param(*one, marks=() if one in QUICK else pytest.mark.long)
        for one in itertools.product(["cut", "flip"], STAGES)
    ],
)
def test_a_transfer_that_breaks_at_any_stage_is_computed_here(
    folder: Path,
    on_one_node: list[int],
    caplog: pytest.LogCaptureFixture,
    fault: Fault,
    stage: str,
) -> None:
    with nodes_of(folder) as nodes:
        params = nodes.prefilled({"call": PROMPT})["call"]
        with FaultyRelay(params["remote_port"], fault, STAGES[stage]) as relay:
            require_computed_here(nodes, {**params, "remote_port": relay.port}, on_one_node)
            require_free(nodes)
    assert nodes.decode.counts == {"failed": 1, "recomputed_tokens": TOKENS}
    assert nodes.prefill.counts["read"] == 1, "told that it is not needed, long before its lease"
    assert len(failures_logged(caplog)) == 1


def test_a_transfer_that_stalls_ends_by_its_timeout(
    folder: Path, on_one_node: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with nodes_of(folder, timeout_s=0.3, lease_s=2.0) as nodes:
        params = nodes.prefilled({"call": PROMPT})["call"]
        with FaultyRelay(params["remote_port"], "stall", ROWS_AT) as relay:
            require_computed_here(nodes, {**params, "remote_port": relay.port}, on_one_node)
            require_free(nodes)
    assert nodes.decode.counts == {"failed": 1, "recomputed_tokens": TOKENS}
    assert nodes.prefill.counts["expired"] == 1, "no time was left to tell"
    assert len(failures_logged(caplog)) == 1


def test_a_failure_that_names_its_blocks_too_is_known_by_its_call(
    folder: Path, on_one_node: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's NIXL reports it. With several cache groups vLLM takes blocks for an error."""
    from hisparsed.engine.reference.connectors import ReferenceConnectors

    without_blocks = ReferenceConnectors.after_forward
    named = []

    def after_forward(self: ReferenceConnectors, finished: set[str]) -> Any:
        output = without_blocks(self, finished)
        if output.failed_recving:
            output.invalid_block_ids = {1, 2}
            named.append(output.failed_recving)
        return output

    monkeypatch.setattr(ReferenceConnectors, "after_forward", after_forward)
    with nodes_of(folder, lease_s=1.0) as nodes:
        params = nodes.prefilled({"call": PROMPT})["call"]
        with FaultyRelay(params["remote_port"], "cut", ROWS_AT) as relay:
            require_computed_here(nodes, {**params, "remote_port": relay.port}, on_one_node)
    assert len(named) == 1


def test_a_prefill_node_that_is_gone_costs_only_the_computation(
    folder: Path, on_one_node: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = listener.getsockname()[1]
    with nodes_of(folder, lease_s=1.0) as nodes:
        params = nodes.prefilled({"call": PROMPT})["call"]
        require_computed_here(nodes, {**params, "remote_port": gone}, on_one_node)
        require_free(nodes)
    assert nodes.decode.counts == {"failed": 1, "recomputed_tokens": TOKENS}
    assert f"127.0.0.1:{gone} cannot be reached" in failures_logged(caplog)[0]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"remote_ticket": "0" * 32}, "the prefix is not offered"),
        ({"remote_num_tokens": TOKENS + 1}, None),
    ],
    ids=["another ticket", "more tokens than the prompt has"],
)
def test_only_the_prefix_of_the_ticket_is_read(
    folder: Path,
    on_one_node: list[int],
    caplog: pytest.LogCaptureFixture,
    changed: dict[str, Any],
    reason: str | None,
) -> None:
    with nodes_of(folder, lease_s=2.0) as nodes:
        params = {**nodes.prefilled({"call": PROMPT})["call"], **changed}
        answers = nodes.decoded({"call": PROMPT}, {"call": params}, ANSWER)
        require_free(nodes)
    assert answers["call"].tokens == on_one_node
    if reason is None:
        assert nodes.decode.counts["fetched_tokens"] == TOKENS
    else:
        assert reason in failures_logged(caplog)[0]


def test_rows_of_another_prompt_are_refused(
    folder: Path, on_one_node: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    other = [*PROMPT[:-300], 32, *PROMPT[-299:]]
    assert other != PROMPT
    with nodes_of(folder) as nodes:
        params = nodes.prefilled({"other": other})["other"]
        require_computed_here(nodes, params, on_one_node)
        require_free(nodes)
    assert "not those of the reader's prompt" in failures_logged(caplog)[0]


@pytest.mark.long
def test_rows_of_another_model_are_refused(
    folder: Path, on_one_node: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with pair(folder, replace(SHAPE, seed=8), SHAPE) as nodes:
        params = nodes.prefilled({"call": PROMPT})["call"]
        require_computed_here(nodes, params, on_one_node)
        require_free(nodes)
    assert "another model: seed is 7 there and 8 here" in failures_logged(caplog)[0]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"remote_host": "192.0.2.1"}, "use an address of this machine"),
        ({"remote_port": "14579"}, "kv_transfer_params.remote_port: '14579' is not a number"),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (
                ({"remote_port": 0}, "is not a number from 1 to 65535"),
                ({"remote_ticket": None}, "kv_transfer_params.remote_ticket: None is not a text"),
                ({"remote_num_tokens": True}, "kv_transfer_params.remote_num_tokens: True"),
            )
        ),
    ],
)
def test_parameters_that_cannot_be_right_are_refused_by_name(
    folder: Path,
    on_one_node: list[int],
    caplog: pytest.LogCaptureFixture,
    changed: dict[str, Any],
    sentence: str,
) -> None:
    params = {
        "do_remote_prefill": True,
        "remote_request_id": "p-call",
        "remote_host": "127.0.0.1",
        "remote_port": 14579,
        "remote_ticket": "0" * 32,
        "remote_num_tokens": TOKENS,
    }
    with nodes_of(folder) as nodes:
        require_computed_here(nodes, {**params, **changed}, on_one_node)
    assert nodes.decode.counts == {"refused": 1}
    assert [sentence in text for text in caplog.messages if "is computed here" in text] == [True]


def test_a_prefix_that_nobody_reads_is_freed_after_its_lease(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "hisparsed.engine")
    with nodes_of(folder, lease_s=3.0) as nodes:
        nodes.prefilled({"call": PROMPT})
        pages = -(-TOKENS // 16)
        nodes.until(
            "only what is read is held", lambda: nodes.prefill.blocks_in_use() == (pages, pages)
        )
        assert not nodes.prefill.scheduler.hisparsed.host.watch.look_at_everything()
        require_free(nodes)
    assert nodes.prefill.counts == {"offered": 1, "expired": 1}
    assert sum("was not read within 3 s" in text for text in caplog.messages) == 1


@pytest.mark.long
def test_waiting_offers_do_not_starve_calls_that_run(folder: Path) -> None:
    with nodes_of(folder, lease_s=3600.0) as nodes:
        prompts = {f"call-{n}": [(n + token) % 90 + 33 for token in PROMPT] for n in range(10)}
        nodes.prefilled(prompts)
        nodes.until("all wait", lambda: nodes.prefill.worker.open_offers == len(prompts))
        requests = report(nodes.prefill.engine)["requests"]
    assert requests["preemptions_total"] == 0
    assert requests["stalls_total"] == 0


def test_a_call_aborted_before_it_is_scheduled_releases_its_prefix(folder: Path) -> None:
    with nodes_of(folder) as nodes:
        params = nodes.prefilled({"call": PROMPT})["call"]
        nodes.decode.send("call", PROMPT, ANSWER, params)
        nodes.decode.engine.abort_request(["call"])
        require_free(nodes)
    assert nodes.prefill.counts == {"offered": 1, "read": 1}


def test_a_call_aborted_while_it_is_fetched_leaves_nothing_behind(folder: Path) -> None:
    with nodes_of(folder, timeout_s=0.5, lease_s=2.0) as nodes:
        params = nodes.prefilled({"call": PROMPT})["call"]
        with FaultyRelay(params["remote_port"], "stall", INDEX_AT) as relay:
            params = {**params, "remote_port": relay.port}
            nodes.decode.send("call", PROMPT, ANSWER, params)
            nodes.until("it is being fetched", lambda: nodes.decode.blocks_in_use() != (0, 0))
            nodes.decode.engine.abort_request(["call"])
            assert nodes.decode.blocks_in_use() != (0, 0), "a fetch may still write into them"
            require_free(nodes)


def test_a_call_aborted_just_before_its_prefix_arrives_leaves_nothing_behind(folder: Path) -> None:
    with nodes_of(folder) as nodes:
        params = nodes.prefilled({"call": PROMPT})["call"]
        nodes.decode.send("call", PROMPT, ANSWER, params)
        nodes.until("it is being fetched", lambda: nodes.decode.blocks_in_use() != (0, 0))
        nodes.decode.engine.abort_request(["call"])
        require_free(nodes)
    assert nodes.decode.counts["fetched"] == 1


def test_a_prefix_of_which_nothing_is_needed_is_released(folder: Path) -> None:
    with nodes_of(folder) as nodes:
        nodes.decoded({"first": PROMPT}, {}, ANSWER)
        params = nodes.prefilled({"begin": PROMPT[:64]})["begin"]
        nodes.decoded({"again": PROMPT}, {"again": params}, ANSWER)
        require_free(nodes)
    assert nodes.prefill.counts == {"offered": 1, "read": 1}
    assert nodes.decode.counts == {}


def test_a_call_sent_to_the_wrong_node_is_served_whole(
    folder: Path, on_one_node: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with nodes_of(folder) as nodes:
        asked = {"do_remote_decode": True}
        answers = nodes.decoded({"call": PROMPT}, {"call": asked}, ANSWER)
        require_free(nodes)
    assert answers["call"].tokens == on_one_node
    assert answers["call"].params is None
    assert any("disaggregation.role is decode" in text for text in caplog.messages)
