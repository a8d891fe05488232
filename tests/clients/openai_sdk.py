"""The OpenAI SDK: a strict tool, a schema, and an answer that is streamed."""

import json
import sys

import openai

MODEL = "hisparsed-reference"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
ASKED = [{"role": "user", "content": "How is the weather?"}]
client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key=sys.argv[2], max_retries=0)
tool = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": SCHEMA}}
answer = client.chat.completions.create(
    model=MODEL, messages=ASKED, tools=[tool], tool_choice="required"
)
(call,) = answer.choices[0].message.tool_calls
assert list(json.loads(call.function.arguments)) == ["city", "days"]
form = {"type": "json_schema", "json_schema": {"name": "w", "strict": True, "schema": SCHEMA}}
answer = client.chat.completions.create(model=MODEL, messages=ASKED, response_format=form)
assert list(json.loads(answer.choices[0].message.content)) == ["city", "days"]
stream = client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=5, stream=True)
assert list(stream)[-1].choices[0].finish_reason in {"stop", "length"}
