"""The answers of a whole node in a container to client libraries, beyond tokens.

Formats, tools, log probabilities; and the words for what is longer than the policy lets calls be.
In a container a user has no name, paths are long, and Kubernetes sets variables.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serve_process import NodeFiles, ServeProcess, plain_environment, policy_document
from streaming import complete

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
LIMIT = 1_000
MODEL_LIMIT = 2_048
QUICKLY_S = 10.0
"""For a body of 36 MB on a busy machine; vLLM alone takes twice as long on an idle one."""


WITHOUT_NAMES = """\
import pwd


def nobody(_):
    raise KeyError("uid not found")


pwd.getpwuid = nobody
"""
"""The module that Python runs first in a process that has it on its path."""


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a container whose user has no name, in a pod next to a service called
    vllm."""
    folder = tmp_path_factory.mktemp("container")
    (folder / "sitecustomize.py").write_text(WITHOUT_NAMES, encoding="utf-8")
    temporary = folder / ("t" * 130)
    temporary.mkdir()
    paths = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "VLLM_PORT": "tcp://10.0.0.1:8000",
        "VLLM_SERVICE_HOST": "10.0.0.1",
        "TMPDIR": str(temporary),
        **dict.fromkeys(("LOGNAME", "USER", "LNAME", "USERNAME", "SUDO_USER"), ""),
    }


@pytest.fixture(scope="module")
def node(
    tmp_path_factory: pytest.TempPathFactory, container: dict[str, str]
) -> Iterator[ServeProcess]:
    files = NodeFiles(tmp_path_factory.mktemp("node"))
    files.write_policy(policy_document(admission={"max_context": LIMIT}))
    served = ServeProcess(files, **container)
    try:
        yield served.wait_until_ready()
        assert served.end() == 0, served.log_end()
        served.assert_nothing_left()
        assert "Traceback" not in served.log()
    finally:
        served.kill()


@pytest.fixture
def client(node: ServeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_an_answer_is_cut_to_what_the_limit_leaves(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="x" * 990, max_tokens=500, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "longest"),
    [("x" * LIMIT, LIMIT), ([65] * LIMIT, LIMIT), ("x" * 5_000, MODEL_LIMIT)],
    ids=["text", "token ids", "longer than the model"],
)
def test_a_prompt_beyond_it_is_told_in_words_that_clients_know(
    client: openai.OpenAI, prompt: str | list[int], longest: int
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=5)
    assert f"This model's maximum context length is {longest} tokens" in str(refused.value)
    assert refused.value.param == "input_tokens"


def test_the_model_list_has_the_limit_in_force(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.model_dump()["max_model_len"] == LIMIT


def test_a_huge_list_of_token_ids_is_refused_quickly(node: ServeProcess) -> None:
    body = b'{"model": "' + MODEL.encode() + b'", "prompt": [' + b"104, " * 7_200_000 + b"104]}"
    began_s = time.monotonic()
    answer = node.http.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert time.monotonic() - began_s < QUICKLY_S
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_tokens")


def test_paths_that_are_not_there_are_told_as_clients_expect(
    node: ServeProcess, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.NotFoundError, match="does not serve POST /v1/embeddings"):
        client.embeddings.create(model=MODEL, input="hello")
    paths = node.http.get("/openapi.json").json()["paths"]
    assert "/v1/chat/completions" in paths
    gone = [path for path in paths if node.http.request("TRACE", path).status_code == 404]
    assert gone == []


def test_a_clients_mistake_on_the_messages_api_is_no_error_of_the_node(node: ServeProcess) -> None:
    call = {"model": MODEL, "max_tokens": 0, "messages": [{"role": "user", "content": "hello"}]}
    assert node.http.post("/v1/messages", json=call).status_code == 400
    lines = [line for line in node.log().splitlines() if "anthropic" in line]
    assert not [line for line in lines if '"level": "error"' in line or "Traceback" in line]


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


def test_it_serves_and_says_what_it_ignores(node: ServeProcess) -> None:
    assert complete(node.http, "hello", 4)["usage"]["completion_tokens"] == 4
    assert "VLLM_PORT=tcp://10.0.0.1:8000 is ignored" in node.log()


@pytest.mark.parametrize(
    "words",
    [
        ("freeze",),
        ("mode", "advise", "split"),
        ("policy", "set", "rebalance.step", "2%", "--for", "1m"),
        ("top", "--once"),
    ],
    ids=" ".join,
)
def test_every_command_works_for_a_user_without_a_name(
    node: ServeProcess, container: dict[str, str], words: tuple[str, ...]
) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "hisparsed", *words, "--socket", str(node.files.socket)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=plain_environment() | container,
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr


def test_the_journal_knows_the_user_by_number(node: ServeProcess) -> None:
    with node.control_http() as control:
        events = control.get("/v1/journal/events").json()["events"]
    assert f"uid {os.geteuid()}" in {event["actor"] for event in events}
