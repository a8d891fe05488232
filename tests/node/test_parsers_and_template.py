"""What `frontend_args` say takes effect on a node that serves, and so do the parsers they name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from serve_process import NodeFiles, ServeProcess

pytestmark = pytest.mark.engine

PLUGIN = '''
from vllm.entrypoints.generate.base.protocol import (
    ExtractedToolCallInformation, FunctionCall, ToolCall
)
from vllm.reasoning import ReasoningParser, ReasoningParserManager
from vllm.tool_parsers import ToolParser, ToolParserManager


@ToolParserManager.register_module("whole-answer")
class WholeAnswer(ToolParser):
    """Takes whatever the model says for the argument of one call."""

    def extract_tool_calls(self, model_output, request):
        call = FunctionCall(name="say", arguments=model_output)
        return ExtractedToolCallInformation(
            tools_called=True, tool_calls=[ToolCall(function=call)], content=None
        )


@ReasoningParserManager.register_module("first-character")
class FirstCharacter(ReasoningParser):
    """Takes the first character for the reasoning."""

    def is_reasoning_end(self, input_ids):
        return True

    def extract_content_ids(self, input_ids):
        return input_ids[1:]

    def extract_reasoning(self, model_output, request):
        return model_output[:1], model_output[1:]

    def extract_reasoning_streaming(self, *arguments):
        return None
'''
TOOLS = [{"type": "function", "function": {"name": "say", "parameters": {"type": "object"}}}]
SAID = "an answer is due"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("frontend")
    (folder / "plugin.py").write_text(PLUGIN, "utf-8")
    (folder / "chat.jinja").write_text("{{ messages[-1]['content'] }}:", "utf-8")
    files = NodeFiles(
        folder,
        engine_args={
            "reasoning_parser": "first-character",
            "reasoning_parser_plugin": str(folder / "plugin.py"),
        },
        frontend_args={
            "chat_template": "chat.jinja",
            "tool_parser_plugin": "plugin.py",
            "tool_call_parser": "whole-answer",
            "enable_auto_tool_choice": True,
            "response_role": "model",
        },
    )
    served = ServeProcess(files)
    try:
        yield served.wait_until_ready()
        assert served.end() == 0, served.log_end()
    finally:
        served.kill()


def chat(node: ServeProcess, **more: Any) -> dict[str, Any]:
    call = {
        "model": "hisparsed-reference",
        "messages": [{"role": "user", "content": SAID}],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }
    answer = node.http.post("/v1/chat/completions", json=call)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_the_chat_template_makes_the_prompt(node: ServeProcess) -> None:
    # The reference model has a token a byte; its own template has special tokens around.
    assert chat(node)["usage"]["prompt_tokens"] == len(SAID) + 1


def test_the_tool_parser_reads_calls_and_the_reasoning_parser_what_comes_before(
    node: ServeProcess,
) -> None:
    plain = chat(node)["choices"][0]["message"]
    with_tools = chat(node, tools=TOOLS)["choices"][0]
    assert plain["reasoning"]
    assert not plain.get("tool_calls")
    (call,) = with_tools["message"]["tool_calls"]
    assert call["function"] == {"name": "say", "arguments": plain["content"]}
    assert with_tools["message"]["reasoning"] == plain["reasoning"]
    assert with_tools["finish_reason"] == "tool_calls"


def test_other_switches_count_and_prefix_hits_are_told_as_before(node: ServeProcess) -> None:
    body = chat(node)
    assert body["choices"][0]["message"]["role"] == "model"
    assert "cached_tokens" in body["usage"]["prompt_tokens_details"]
