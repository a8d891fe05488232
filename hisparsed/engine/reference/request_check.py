"""Refuses calls that ask for what the reference node does not do.

A 400 for the client instead of tokens that ignore what was asked. Checks sampling parameters
only; the rest of a call is vLLM's to judge.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from vllm.exceptions import VLLMValidationError

from hisparsed.engine.limited_llm import LimitedLLM

NOT_HONOURED = (
    "logprob_token_ids",
    "prompt_logprob_token_ids",
    "prompt_logprob_start",
    "thinking_token_budget",
    "trace_decode_token_ids",
)
"""Sampling parameters that vLLM's GPU worker follows and the reference node does not; not every
version of vLLM has each."""


def unsupported(params: Any) -> str | None:
    """The parameter of ``params`` (vLLM's ``SamplingParams``) that is not honoured."""
    return next((name for name in NOT_HONOURED if getattr(params, name, None) is not None), None)


class ReferenceLLM(LimitedLLM):
    """vLLM's engine front that looks at each request before it takes it in."""

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **named: Any
    ) -> AsyncGenerator[Any, None]:
        """Raises ``VLLMValidationError``, which vLLM's API answers with 400."""
        name = unsupported(sampling_params)
        if name is not None:
            raise VLLMValidationError(
                f"{name} is not supported by the reference node; remove it", parameter=name
            )
        return super().generate(prompt, sampling_params, request_id, **named)
