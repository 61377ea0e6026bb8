"""openai-python: chat, streams and their helpers, parsed answers, tools, responses, embeddings, errors and retries."""

from __future__ import annotations

import asyncio
import base64
import json
import struct

import openai
from checks import BASE_URL, KEY, MODEL, PERSON, WEATHER, WEATHER_QUESTION, check, raised, run
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
HELLO = [{"role": "user", "content": "Hello, who are you?"}]
ASK_WEATHER = [{"role": "user", "content": WEATHER_QUESTION}]


class Person(BaseModel):
    name: str
    age: int


@check
def a_chat_answers_plain_and_streamed_alike() -> None:
    plain = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=40)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            temperature=0,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content
    assert text
    assert chunks[-1].choices == []
    assert chunks[-1].usage == plain.usage
    assert plain._request_id


@check
def the_stream_helper_builds_the_same_message() -> None:
    with client.chat.completions.stream(model=MODEL, messages=HELLO, temperature=0, max_tokens=40) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    plain = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=40)
    assert final.choices[0].message.content == plain.choices[0].message.content


@check
def parse_gives_an_instance_of_the_class() -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "Invent a person."}], response_format=Person, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


@check
def json_schema_holds_for_every_choice() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, response_format=schema, n=3, seed=5, max_tokens=200
    )
    for choice in answer.choices:
        Person.model_validate_json(choice.message.content or "")


@check
def a_tool_is_called_and_its_result_is_read() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK_WEATHER, tools=[WEATHER], temperature=0)
    assert answer.choices[0].finish_reason == "tool_calls"
    [call] = answer.choices[0].message.tool_calls or []
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"temperature": 21})}
    told = client.chat.completions.create(
        model=MODEL, messages=[*ASK_WEATHER, answer.choices[0].message, result], tools=[WEATHER], temperature=0
    )
    assert "21" in (told.choices[0].message.content or "")


@check
def a_streamed_call_is_the_plain_one() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=ASK_WEATHER, tools=[WEATHER], tool_choice="required", temperature=0
    ) as stream:
        kinds = [event.type for event in stream]
        [call] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert "tool_calls.function.arguments.delta" in kinds
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}


@check
def a_named_strict_tool_is_called_whatever_was_asked() -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        tools=[strict],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=200,
        seed=2,
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert set(json.loads(call.function.arguments)) == {"city"}


@check
def completions_score_and_echo() -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The sky is blue.", max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])


@check
def responses_answer_stream_and_follow_up() -> None:
    first = client.responses.create(model=MODEL, input="My name is Ada.", temperature=0, max_output_tokens=40)
    assert first.output_text
    with client.responses.stream(
        model=MODEL, input="What is my name?", previous_response_id=first.id, temperature=0, max_output_tokens=40
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert "response.output_text.delta" in kinds
    assert client.responses.retrieve(final.id).output_text == final.output_text


@check
def responses_parse_and_call_tools() -> None:
    parsed = client.responses.parse(model=MODEL, input="Invent a person.", text_format=Person, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Person)
    tool = {"type": "function", **WEATHER["function"], "strict": False}
    called = client.responses.create(model=MODEL, input=WEATHER_QUESTION, tools=[tool], temperature=0)
    [call] = [item for item in called.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "Paris"}


@check
def embeddings_come_as_floats_and_as_base64() -> None:
    texts = ["a cat", "a dog"]
    floats = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    coded = client.embeddings.create(model=MODEL, input=texts, encoding_format="base64")
    for plain, packed in zip(floats.data, coded.data, strict=True):
        raw = base64.b64decode(packed.embedding)  # type: ignore[arg-type]
        assert raw == struct.pack(f"<{len(plain.embedding)}f", *plain.embedding)
    assert floats.usage.prompt_tokens > 0


@check
def errors_have_their_classes_and_codes() -> None:
    cases = [
        (openai.NotFoundError, "model_not_found", {"model": "nobody"}),
        (openai.BadRequestError, "integer_below_min_value", {"max_tokens": -2}),
        (openai.BadRequestError, "context_length_exceeded", {"messages": [{"role": "user", "content": "a b " * 4096}]}),
        (openai.BadRequestError, "unknown_parameter", {"extra_body": {"temprature": 1}}),
    ]
    for kind, code, options in cases:
        asked = {"model": MODEL, "messages": HELLO, **options}
        error = raised(kind, lambda asked=asked: client.chat.completions.create(**asked))
        assert error.code == code, error
        assert error.request_id
    assert (
        raised(openai.AuthenticationError, client.with_options(api_key="wrong").models.list).code == "invalid_api_key"
    )


@check
async def the_asynchronous_client_runs_many_at_once() -> None:
    async with AsyncOpenAI(base_url=BASE_URL, api_key=KEY) as many:
        requests = [
            many.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=20, seed=seed) for seed in range(16)
        ]
        answers = await asyncio.gather(*requests)
    assert len({answer.id for answer in answers}) == 16


@check
def a_stream_can_be_left() -> None:
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=500, stream=True)
    next(iter(stream))
    stream.close()
    assert client.models.retrieve(MODEL).id == MODEL


run()
