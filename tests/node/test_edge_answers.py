"""What a client is told by a whole node whose policy limits the length of calls."""

from __future__ import annotations

import time
from collections.abc import Iterator

import openai
import pytest
from serve_process import NodeFiles, ServeProcess, policy_document

pytestmark = pytest.mark.engine

MODEL = "hisparsed-reference"
LIMIT = 1_000
MODEL_LIMIT = 2_048
QUICKLY_S = 10.0
"""For a body of 36 MB on a busy machine; vLLM alone takes twice as long on an idle one."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    files = NodeFiles(
        tmp_path_factory.mktemp("edge"),
        frontend_args={"tool_call_parser": None, "enable_auto_tool_choice": False},
    )
    files.write_policy(policy_document(admission={"max_context": LIMIT}))
    served = ServeProcess(files)
    try:
        yield served.wait_until_ready()
        assert served.end() == 0, served.log_end()
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


def test_paths_and_tools_that_are_not_there_are_told_as_clients_expect(
    node: ServeProcess, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.NotFoundError, match="does not serve POST /v1/embeddings"):
        client.embeddings.create(model=MODEL, input="hello")
    with pytest.raises(openai.BadRequestError, match=r"frontend_args\.tool_call_parser"):
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hello"}],
            tools=[{"type": "function", "function": {"name": "a"}}],
        )
    paths = node.http.get("/openapi.json").json()["paths"]
    assert "/v1/chat/completions" in paths
    gone = [path for path in paths if node.http.request("TRACE", path).status_code == 404]
    assert gone == []


def test_a_clients_mistake_on_the_messages_api_is_no_error_of_the_node(node: ServeProcess) -> None:
    call = {"model": MODEL, "max_tokens": 0, "messages": [{"role": "user", "content": "hello"}]}
    assert node.http.post("/v1/messages", json=call).status_code == 400
    lines = [line for line in node.log().splitlines() if "anthropic" in line]
    assert not [line for line in lines if '"level": "error"' in line or "Traceback" in line]
