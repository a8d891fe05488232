"""With ``--log-error-stack`` a refused call's prompt is logged whole, at ERROR.

``validation_exception_handler`` bounds what it answers. It also logs the ``RequestValidationError``
with its traceback, and the words of that exception hold the whole input of every error.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from tests.upstream.outcome import logged_errors, run

LONG = "my account number is 0815" + " and so on" * 500


def refused() -> Any:
    """The error that FastAPI raises for a chat call with a wrong type in its prompt."""
    from fastapi.exceptions import RequestValidationError
    from pydantic import TypeAdapter, ValidationError
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    body = {"model": "m", "messages": LONG}
    try:
        TypeAdapter(ChatCompletionRequest).validate_python(body)
    except ValidationError as error:
        return RequestValidationError(error.errors(), body=body)
    raise AssertionError("vLLM takes this call")


def reproduce() -> str | None:
    from vllm.entrypoints.serve.exception_handling.handlers import validation

    app = SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(log_error_stack=True)))
    call: Any = SimpleNamespace(app=app, state=SimpleNamespace())

    async def handle() -> Any:
        try:
            raise refused()
        except Exception as error:
            return await validation.validation_exception_handler(call, error)

    with logged_errors(validation.logger.name) as lines:
        answer = asyncio.run(handle())
    whole = [line for line in lines if LONG in line]
    if not whole:
        return None
    return (
        f"A refused call with a prompt of {len(LONG):,} characters is logged in {len(whole[0]):,} "
        f"characters, which have the whole prompt; the answer has {len(answer.body):,}."
    )


if __name__ == "__main__":
    run(reproduce)
