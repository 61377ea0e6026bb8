"""Pydantic AI: text, streams, tools and structured output by tool and by schema."""

from __future__ import annotations

from checks import BASE_URL, KEY, MODEL, WEATHER_QUESTION, check, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=BASE_URL, api_key=KEY)
chat, responses = OpenAIChatModel(MODEL, provider=provider), OpenAIResponsesModel(MODEL, provider=provider)
SETTINGS = {"temperature": 0.0, "max_tokens": 200}


class Person(BaseModel):
    name: str
    age: int


@check
async def text_is_the_same_streamed() -> None:
    for model in (chat, responses):
        agent = Agent(model, model_settings=SETTINGS)
        plain = await agent.run("Hello, who are you?")
        async with agent.run_stream("Hello, who are you?") as stream:
            text = "".join([piece async for piece in stream.stream_text(delta=True)])
        assert text == plain.output
        assert text


@check
async def a_tool_is_run_and_its_result_told() -> None:
    agent = Agent(chat, model_settings=SETTINGS)
    cities = []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        cities.append(city)
        return '{"temperature": 21}'

    assert "21" in (await agent.run(WEATHER_QUESTION)).output
    assert cities == ["Paris"]


@check
async def structured_output_by_tool_and_by_schema() -> None:
    for output in (ToolOutput(Person), NativeOutput(Person)):
        answer = await Agent(chat, output_type=output, model_settings=SETTINGS).run("Invent a person.")
        assert isinstance(answer.output, Person)


run()
