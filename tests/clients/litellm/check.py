"""LiteLLM: chat, streams, tools, schemas, text completion, embeddings and its mapping of errors."""

from __future__ import annotations

import json

import litellm
from checks import BASE_URL, KEY, MODEL, PERSON, WEATHER, WEATHER_QUESTION, check, raised, run

litellm.num_retries = 0
COMMON = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": KEY, "temperature": 0, "max_tokens": 200}
HELLO = [{"role": "user", "content": "Hello, who are you?"}]


@check
def a_chat_answers_plain_and_streamed_alike() -> None:
    plain = litellm.completion(messages=HELLO, **COMMON)
    chunks = list(litellm.completion(messages=HELLO, stream=True, stream_options={"include_usage": True}, **COMMON))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content
    built = litellm.stream_chunk_builder(chunks, messages=HELLO)
    assert built.usage.completion_tokens == plain.usage.completion_tokens


@check
def a_tool_is_called() -> None:
    answer = litellm.completion(messages=[{"role": "user", "content": WEATHER_QUESTION}], tools=[WEATHER], **COMMON)
    [call] = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}


@check
def a_schema_holds() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = litellm.completion(messages=HELLO, response_format=schema, **COMMON)
    assert set(json.loads(answer.choices[0].message.content)) == {"name", "age"}


@check
def errors_are_mapped() -> None:
    wrong = {**COMMON, "top_logprobs": 99}
    assert "top_logprobs" in str(raised(litellm.BadRequestError, lambda: litellm.completion(messages=HELLO, **wrong)))


@check
def text_completion_and_embeddings() -> None:
    text = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="Once", api_base=BASE_URL, api_key=KEY, max_tokens=5
    )
    assert text.choices[0].text
    vectors = litellm.embedding(model=f"openai/{MODEL}", input=["a cat"], api_base=BASE_URL, api_key=KEY)
    assert len(vectors.data[0]["embedding"]) > 0


run()
