"""LlamaIndex, by its class for compatible servers: chat, completion, streams, tools."""

from __future__ import annotations

from checks import BASE_URL, KEY, MODEL, WEATHER_QUESTION, check, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model=MODEL,
    api_base=BASE_URL,
    api_key=KEY,
    temperature=0,
    max_tokens=100,
    max_retries=0,
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=2048,
)
HELLO = [ChatMessage(role="user", content="Hello, who are you?")]


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return city


@check
def a_chat_answers_plain_and_streamed_alike() -> None:
    plain = llm.chat(HELLO).message.content
    streamed = "".join(part.delta or "" for part in llm.stream_chat(HELLO))
    assert plain == streamed
    assert plain


@check
def a_completion_answers() -> None:
    text = OpenAILike(
        model=MODEL, api_base=BASE_URL, api_key=KEY, temperature=0, max_tokens=10, is_chat_model=False
    ).complete("Once upon a time")
    assert text.text


@check
def a_tool_is_called() -> None:
    answer = llm.chat_with_tools([FunctionTool.from_defaults(get_weather)], user_msg=WEATHER_QUESTION)
    [call] = llm.get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "Paris"})


@check
async def the_asynchronous_side_streams() -> None:
    parts = [part.delta or "" async for part in await llm.astream_chat(HELLO)]
    assert "".join(parts) == llm.chat(HELLO).message.content


run()
