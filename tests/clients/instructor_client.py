"""instructor: answers of a model's form, by a tool and by a schema."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    city: str
    days: int


node = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key=sys.argv[2], max_retries=0)
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(node, mode=mode)
    found = client.chat.completions.create(
        model="hisparsed-reference",
        messages=[{"role": "user", "content": "How is the weather?"}],
        response_model=Weather,
        max_retries=0,
    )
    assert isinstance(found, Weather), mode
