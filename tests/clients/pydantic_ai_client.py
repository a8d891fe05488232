"""pydantic-ai: a strict tool, answers of a model's form by a tool and by a schema, and text."""

import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, Tool, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel):
    city: str
    days: int


def forecast(city: str, days: int) -> str:
    """The weather of the next days."""
    return f"{days} days of rain in {city}"


node = OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key=sys.argv[2])
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind("hisparsed-reference", provider=node)
    for form in (ToolOutput(Weather, strict=True), NativeOutput(Weather, strict=True)):
        found = Agent(model, output_type=form, retries=0).run_sync("How is the weather?")
        assert isinstance(found.output, Weather), (kind, form)
    # Whether it calls the tool is left to the model; it must say something in the end.
    tools = [Tool(forecast, strict=True)]
    said = Agent(model, tools=tools, retries=0).run_sync("How is the weather?")
    assert said.output, kind
