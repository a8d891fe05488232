"""Refuses calls that ask for what the reference model's sampler does not do.

A 400 for the client instead of tokens that ignore what was asked. Checks sampling parameters
only; the rest of a call is vLLM's to judge.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from vllm.exceptions import VLLMValidationError

from hisparsed.engine.limited_llm import LimitedLLM

NEUTRAL: dict[str, object] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "logprobs": None,
    "prompt_logprobs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "structured_outputs": None,
}
"""Sampling parameters that are not honoured, each with the value that asks for nothing."""


def unsupported_reason(params: Any) -> str | None:
    """What of ``params`` (vLLM's ``SamplingParams``) is not honoured; ``None`` when all is."""
    for name, neutral in NEUTRAL.items():
        value = getattr(params, name)
        if value not in (neutral, [], {}):
            shown = "" if name == "structured_outputs" else f" (got {value!r})"
            return (
                f"{name}{shown} is not supported by the reference node, which knows temperature, "
                "top_p, top_k, seed, min_tokens and stop; leave it out"
            )
    return None


class ReferenceLLM(LimitedLLM):
    """vLLM's engine front that looks at each request before it takes it in."""

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **named: Any
    ) -> AsyncGenerator[Any, None]:
        """Raises ``VLLMValidationError``, which vLLM's API answers with 400."""
        reason = unsupported_reason(sampling_params)
        if reason is not None:
            raise VLLMValidationError(reason)
        return super().generate(prompt, sampling_params, request_id, **named)
