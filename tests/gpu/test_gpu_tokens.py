"""The token comparison on the reference node: it passes there, and finds what is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gpu_tokens
import pytest
from conversations import EngineShape, build_engine, core_of
from gpu_tokens import Calls, compare

pytestmark = pytest.mark.engine

CALLS = Calls(count=3, prompt=300, answer=24, log_probabilities=False)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build_engine(tmp_path_factory.mktemp("tokens"), EngineShape(gpu_blocks=1500))


def test_all_rounds_of_a_sound_engine_are_equal(engine: Any) -> None:
    figures = compare(engine, CALLS)
    assert figures["tokens_equal"] == 3 * 24
    assert figures["distinct_tokens"] > 10
    assert figures["moves"] > 5
    assert figures["offload_loaded_tokens"] > 0
    assert figures["compared_by"] == "equal tokens"
    assert figures["rows_loaded"] > 0
    assert figures["residency_pressed"] != ["full"]
    assert figures["move_ms_most"] >= figures["move_ms_median"] > 0


def test_a_wrong_row_is_found(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that come from the host are their neighbours."""
    executor = core_of(engine).model_executor
    fetch = executor._hot._fetch

    def fetch_wrong(layout: Any, found: Any) -> None:
        fetch(layout, replace(found, swap_host=found.swap_host ^ 1))

    monkeypatch.setattr(executor._hot, "_fetch", fetch_wrong)
    salted(monkeypatch, "wrong")
    with pytest.raises(AssertionError, match="from the host: call 0 has another token at"):
        compare(engine, CALLS)


def test_an_engine_that_differs_from_itself_with_room_proves_nothing(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a kernel adds up in another order each time: no fault of moved levers."""
    play = gpu_tokens.play

    def play_unsteady(engine: Any, calls: Calls, salt: str, *rest: Any) -> Any:
        answered = play(engine, calls, f"unsteady-{salt}", *rest)
        if salt == "again":
            answered.tokens[1][5] += 1
        return answered

    monkeypatch.setattr(gpu_tokens, "play", play_unsteady)
    with pytest.raises(AssertionError, match=r"once more: call 1 .* at 5 .*no other round can"):
        compare(engine, CALLS)


@pytest.mark.long
def test_steps_of_another_shape_prove_nothing(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    play = gpu_tokens.play

    def play_with_one_call_less(engine: Any, calls: Calls, salt: str, *rest: Any) -> Any:
        count = calls.count - (salt == "pressed")
        return play(engine, replace(calls, count=count), f"shape-{salt}", *rest)

    monkeypatch.setattr(gpu_tokens, "play", play_with_one_call_less)
    with pytest.raises(AssertionError, match="had another shape than with room"):
        compare(engine, CALLS)


def salted(patch: pytest.MonkeyPatch, name: str) -> None:
    """Prefixes of earlier tests on the same engine are not found."""
    play = gpu_tokens.play
    patch.setattr(
        gpu_tokens,
        "play",
        lambda engine, calls, salt, *rest: play(engine, calls, f"{name}-{salt}", *rest),
    )


@pytest.mark.long
def test_a_round_that_stays_on_the_gpu_is_no_proof(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_tokens.Squeeze, "leave", lambda squeeze, free: None)
    salted(monkeypatch, "resident")
    with pytest.raises(AssertionError, match="no request left the GPU"):
        compare(engine, CALLS)
