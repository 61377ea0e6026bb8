"""LangChain: chat, streams, structured output by schema and by tool, tools, embeddings, batches."""

from __future__ import annotations

from checks import BASE_URL, KEY, MODEL, WEATHER_QUESTION, check, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

model = ChatOpenAI(model=MODEL, base_url=BASE_URL, api_key=KEY, temperature=0, max_tokens=200, max_retries=0)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f'{{"city": "{city}", "temperature": 21}}'


@check
def a_chat_answers_plain_and_streamed_alike() -> None:
    plain = model.invoke("Hello, who are you?")
    chunks = list(model.stream("Hello, who are you?", stream_usage=True))
    assert "".join(chunk.text for chunk in chunks) == plain.text
    assert plain.usage_metadata
    assert sum((chunks[1:]), chunks[0]).usage_metadata["output_tokens"] == plain.usage_metadata["output_tokens"]


@check
def structured_output_by_schema_and_by_tool() -> None:
    for method in ("json_schema", "function_calling"):
        person = model.with_structured_output(Person, method=method).invoke("Invent a person.")
        assert isinstance(person, Person), method


@check
def a_tool_is_called_and_its_result_is_read() -> None:
    messages = [HumanMessage(WEATHER_QUESTION)]
    answer = model.bind_tools([get_weather]).invoke(messages)
    [call] = answer.tool_calls
    assert call["args"] == {"city": "Paris"}
    messages += [answer, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    assert "21" in model.bind_tools([get_weather]).invoke(messages).text


@check
def a_streamed_call_adds_up() -> None:
    chunks = list(model.bind_tools([get_weather], tool_choice="any").stream(WEATHER_QUESTION))
    whole = sum(chunks[1:], chunks[0])
    assert whole.tool_calls[0]["name"] == "get_weather"


@check
def the_responses_api_answers() -> None:
    responses = ChatOpenAI(model=MODEL, base_url=BASE_URL, api_key=KEY, temperature=0, use_responses_api=True)
    assert responses.invoke("Hello, who are you?").text == model.invoke("Hello, who are you?").text


@check
def a_batch_and_embeddings() -> None:
    assert len(model.batch(["Hello"] * 8, config={"max_concurrency": 8})) == 8
    embeddings = OpenAIEmbeddings(model=MODEL, base_url=BASE_URL, api_key=KEY, check_embedding_ctx_length=False)
    first, second = embeddings.embed_documents(["a cat", "a dog"])
    assert len(first) == len(second) > 0


run()
