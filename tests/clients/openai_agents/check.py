"""OpenAI Agents: a run with a tool over responses and over chat, streamed, and tools beside an output type."""

from __future__ import annotations

import agents
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from checks import BASE_URL, KEY, MODEL, WEATHER_QUESTION, check, run
from openai import AsyncOpenAI
from pydantic import BaseModel

agents.set_tracing_disabled(True)
MODELS = (OpenAIResponsesModel, OpenAIChatCompletionsModel)
SETTINGS = ModelSettings(temperature=0, max_tokens=200)


class Person(BaseModel):
    name: str
    age: int


@function_tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f'{{"city": "{city}", "temperature": 21}}'


def agent(kind: type, **options: object) -> Agent:
    client = AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
    return Agent(name="tiny", model=kind(model=MODEL, openai_client=client), model_settings=SETTINGS, **options)


@check
async def a_tool_is_run_and_its_result_told() -> None:
    for kind in MODELS:
        result = await Runner.run(agent(kind, tools=[get_weather]), WEATHER_QUESTION)
        assert "21" in result.final_output, kind


@check
async def a_run_streams() -> None:
    for kind in MODELS:
        result = Runner.run_streamed(agent(kind), "Hello, who are you?")
        deltas = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        assert "".join(deltas) == result.final_output, kind


@check
async def an_output_type_holds_beside_tools() -> None:
    for kind in MODELS:
        result = await Runner.run(agent(kind, tools=[get_weather], output_type=Person), "Invent a person.", max_turns=4)
        assert isinstance(result.final_output, Person), kind


run()
