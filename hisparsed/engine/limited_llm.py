"""vLLM's engine front with the operator's context limit; it reports the end of an engine as an
error.

Every node's front is one of these. An engine core that is asked to stop aborts its calls, and
vLLM's APIs would pass that on as an answer that is whole; here it counts as the engine's death.
Judges lengths, and ``kv_transfer_params`` that clients send through ``vllm_xargs``: vLLM takes text
and numbers there, and then reads an object. The connector checks the fields of the object. Order
and number of calls are not checked here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM

from hisparsed.engine.context_limit import CallLength, CallTooLongError, ContextLimit

TRANSFER = "kv_transfer_params"
_SHOWN = 60
_ABORTED = "abort"
"""vLLM's finish reason of a call that was ended early."""


def transfer_fault(extra_args: Mapping[str, Any] | None) -> str | None:
    """Why ``extra_args`` of a call are invalid; ``None`` if they are valid."""
    given = extra_args.get(TRANSFER) if extra_args else None
    if given is None or isinstance(given, Mapping):
        return None
    shown = repr(given)
    if len(shown) > _SHOWN:
        shown = f"{shown[:_SHOWN]}..."
    return (
        f"vllm_xargs.{TRANSFER}: {shown} is not an object; send an object in {TRANSFER} at the top "
        "of the call, as a prefill node answered it, or remove it"
    )


class LimitedLLM(AsyncLLM):  # type: ignore[misc]
    """vLLM's engine front with a context limit that can change while it serves."""

    context_limit: ContextLimit
    """Set by ``start_engine``, since vLLM makes this object."""
    stops = False
    """The engine core was asked to stop, by a process other than the daemon."""

    @property
    def errored(self) -> bool:
        """Whether answers of the engine are no longer valid."""
        return self.stops or bool(super().errored)

    @property
    def chars_per_token(self) -> int | None:
        """Characters of the longest token; ``None`` without a tokenizer."""
        tokenizer = self.renderer.tokenizer
        return None if tokenizer is None else int(tokenizer.max_chars_per_token)

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **named: Any
    ) -> AsyncGenerator[Any, None]:
        """As vLLM's. Raises ``VLLMValidationError`` when called, not when iterated, so that
        its API answers 400 to a streaming client too."""
        fault = transfer_fault(getattr(sampling_params, "extra_args", None))
        if fault is not None:
            raise VLLMValidationError(fault, parameter=f"vllm_xargs.{TRANSFER}")
        limit = self.context_limit
        length = self._length(prompt, sampling_params)
        turn = False
        if length is not None and limit.max_tokens is not None:
            try:
                answer = limit.answer_tokens(length)
            except CallTooLongError as error:
                raise VLLMValidationError(str(error), parameter="input_tokens") from error
            if answer is not None:
                sampling_params = sampling_params.clone()
                sampling_params.max_tokens = answer
            turn = limit.must_take_turns(length)
        outputs = self._unless_aborted(
            super().generate(prompt, sampling_params, request_id, **named)
        )
        return limit.in_turn(outputs) if turn else outputs

    async def _unless_aborted(
        self, outputs: AsyncGenerator[Any, None]
    ) -> AsyncGenerator[Any, None]:
        """Raises vLLM's error of a dead engine instead of an output that was cut off.

        A client that disconnects, and a limit of the daemon, end the reading; only the end of the
        engine core aborts a call that is still read.
        """
        async with aclosing(outputs):
            async for output in outputs:
                if any(one.finish_reason == _ABORTED for one in output.outputs):
                    self.stops = True
                    raise self.dead_error
                yield output

    def _length(self, prompt: Any, params: Any) -> CallLength | None:
        """``None`` for a prompt that is not tokenised yet; vLLM's API tokenises first."""
        tokens = (
            prompt.get("prompt_token_ids")
            if isinstance(prompt, dict)
            else getattr(prompt, "prompt_token_ids", None)
        )
        if tokens is None:
            return None
        prompt_tokens = len(tokens)
        # vLLM fills in what the model has left where a client sets no limit.
        unset = (None, self.model_config.max_model_len - prompt_tokens)
        asked = None if params.max_tokens in unset else int(params.max_tokens)
        return CallLength(prompt_tokens, asked)
