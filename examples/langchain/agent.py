"""LangChain: a chat model with a tool, and an answer as a pydantic class."""

import os

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

URL = os.environ.get("GENSERVE_URL", "http://127.0.0.1:8000")


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    country: str = Field(max_length=20)


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"18 degrees in {city}"


model = ChatOpenAI(model="smollm2", base_url=f"{URL}/v1", api_key="none", max_tokens=200)
asked = model.bind_tools([get_weather], tool_choice="any").invoke("What is the weather in Paris?")
for call in asked.tool_calls:
    print(get_weather.invoke(call).content)
print(model.with_structured_output(City, method="json_schema").invoke("Name a city in Italy."))
