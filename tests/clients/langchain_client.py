"""langchain: structured output."""

import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    city: str
    days: int


chat = ChatOpenAI(
    model="hisparsed-reference", base_url=f"{sys.argv[1]}/v1", api_key=sys.argv[2], max_retries=0
)
for method in ("json_schema", "function_calling"):
    found = chat.with_structured_output(Weather, method=method, strict=True).invoke(
        "How is the weather?"
    )
    assert isinstance(found, Weather), method
