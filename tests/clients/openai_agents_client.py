"""The OpenAI Agents SDK: a strict tool that is called, text after it, and an answer of a form."""

import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    city: str
    days: int


called = []


@function_tool
def forecast(city: str, days: int) -> str:
    """The weather of the next days."""
    called.append((city, days))
    return "rain"


set_tracing_disabled(True)
node = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key=sys.argv[2], max_retries=0)
for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    model = kind("hisparsed-reference", node)
    # The SDK asks for the tool in the first turn, and leaves it to the model from then on.
    agent = Agent(
        name="weather",
        model=model,
        tools=[forecast],
        model_settings=ModelSettings(tool_choice="required"),
    )
    found = Runner.run_sync(agent, "How is the weather?", max_turns=3)
    assert found.final_output, kind
    assert called.pop(), kind
    agent = Agent(name="form", model=model, output_type=Weather)
    found = Runner.run_sync(agent, "How is the weather?", max_turns=1)
    assert isinstance(found.final_output, Weather), kind
