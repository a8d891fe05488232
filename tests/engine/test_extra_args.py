"""``kv_transfer_params`` that come by way of ``vllm_xargs`` are an object or refused with 400."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from hisparsed.engine.extra_args import transfer_fault
from hisparsed.engine.limited_llm import LimitedLLM


@pytest.mark.parametrize("given", ["x", "", 5, 0, 0.5, True, [], [1, "a"]])
def test_what_is_no_object_is_named_with_what_would_be_right(given: Any) -> None:
    fault = transfer_fault({"kv_transfer_params": given})
    assert fault is not None
    assert fault.startswith(f"vllm_xargs.kv_transfer_params: {given!r} is not an object; ")
    assert "send an object in kv_transfer_params" in fault


def test_a_long_value_is_shown_by_its_beginning() -> None:
    fault = transfer_fault({"kv_transfer_params": "x" * 5_000})
    assert fault is not None
    assert len(fault) < 300


@pytest.mark.parametrize(
    "extra_args",
    [
        None,
        {},
        {"kv_transfer_params": None},
        {"kv_transfer_params": {}},
        {"kv_transfer_params": {"do_remote_decode": "yes", "remote_block_ids": [[None], "z"]}},
        {"session_id": "x", "ec_transfer_params": "x"},
    ],
)
def test_objects_pass_whatever_stands_in_them(extra_args: dict[str, Any] | None) -> None:
    assert transfer_fault(extra_args) is None


def test_the_front_refuses_the_call_before_the_engine_sees_it() -> None:
    params = SamplingParams(extra_args={"kv_transfer_params": "x"})
    front = LimitedLLM.__new__(LimitedLLM)  # no engine: nothing of it is touched
    with pytest.raises(VLLMValidationError, match="'x' is not an object") as refused:
        front.generate({"prompt_token_ids": [1]}, params, "a-call")
    assert refused.value.parameter == "vllm_xargs.kv_transfer_params"
