"""The Anthropic SDK: an answer, and a tool that is called."""

import sys

import anthropic

MODEL = "hisparsed-reference"
ASKED = [{"role": "user", "content": "How is the weather?"}]
client = anthropic.Anthropic(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=0)
answer = client.messages.create(model=MODEL, messages=ASKED, max_tokens=5)
assert answer.stop_reason in {"max_tokens", "end_turn"}
tool = {"name": "weather", "input_schema": {"type": "object", "properties": {}}}
answer = client.messages.create(
    model=MODEL, messages=ASKED, max_tokens=200, tools=[tool], tool_choice={"type": "any"}
)
assert answer.stop_reason == "tool_use"
assert answer.content[0].name == "weather"
