"""What clients ask for beyond tokens, through their own library against a whole node."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serve_process import ServeProcess

pytestmark = pytest.mark.engine

MODEL = "hisparsed-reference"
ASKED: Any = [{"role": "user", "content": "How is the weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "strict": True, "parameters": SCHEMA},
}


@pytest.fixture
def client(node: ServeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def is_weather(arguments: str) -> bool:
    made = json.loads(arguments)
    return list(made) == ["city", "days"] and isinstance(made["days"], int)


def test_response_format_is_kept(client: openai.OpenAI) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "weather", "strict": True, "schema": SCHEMA},
    }
    answer = client.chat.completions.create(model=MODEL, messages=ASKED, response_format=form)
    assert answer.choices[0].finish_reason == "stop"
    assert is_weather(answer.choices[0].message.content or "")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_tool_is_called_as_asked(client: openai.OpenAI, choice: Any, strict: bool) -> None:
    tool = {**WEATHER, "function": {**WEATHER["function"], "strict": strict}}
    answer = client.chat.completions.create(
        model=MODEL, messages=ASKED, tools=[tool], tool_choice=choice
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "weather"
    assert is_weather(call.function.arguments)


def test_where_a_tool_may_be_called_or_not_something_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASKED, tools=[WEATHER], tool_choice="auto"
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.message.content
    assert choice.message.content.isalpha()


def test_a_streamed_tool_call_is_the_same(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model=MODEL,
        messages=ASKED,
        tools=[WEATHER],
        tool_choice="required",
        temperature=0,
        stream=True,
    ) as stream:
        parts = [one for chunk in stream for one in chunk.choices[0].delta.tool_calls or ()]
    assert is_weather("".join(one.function.arguments or "" for one in parts if one.function))


def test_responses_and_messages_take_tools_too(client: openai.OpenAI, node: ServeProcess) -> None:
    tool: Any = {"type": "function", "name": "weather", "strict": True, "parameters": SCHEMA}
    answer = client.responses.create(
        model=MODEL, input="hello", tools=[tool], tool_choice="required"
    )
    (called,) = answer.output
    assert called.type == "function_call"
    assert is_weather(called.arguments)
    message = node.http.post(
        "/v1/messages",
        json={
            "model": MODEL,
            "max_tokens": 100,
            "messages": ASKED,
            "tools": [{"name": "weather", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
    ).json()
    assert message["stop_reason"] == "tool_use"
    assert message["content"][0]["name"] == "weather"


def test_log_probabilities_of_answer_and_prompt(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=ASKED, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    told = chat.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    for one in told.content:
        assert one.top_logprobs[0].logprob == one.logprob
        assert one.top_logprobs[1].logprob < one.logprob < 0
    prompt = "many words"
    echoed = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=2, temperature=0, logprobs=1, echo=True
    )
    values = echoed.choices[0].logprobs
    assert values is not None
    assert values.token_logprobs is not None
    assert len(values.token_logprobs) == len(prompt) + 2
    assert values.token_logprobs[0] is None
    assert all(math.isfinite(one) for one in values.token_logprobs[1:])


def test_a_bias_and_penalties_change_what_is_said(client: openai.OpenAI) -> None:
    def say(**asked: Any) -> str:
        answer = client.completions.create(
            model=MODEL, prompt="and so", max_tokens=24, temperature=0, **asked
        )
        return answer.choices[0].text

    assert set(say(logit_bias={"65": 100})) == {"A"}
    penalised = say(frequency_penalty=2.0, presence_penalty=2.0)
    assert len(set(penalised)) == len(penalised)
    assert len(set(say())) < 24
