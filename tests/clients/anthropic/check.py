"""The Anthropic SDK against /v1/messages: text, streams, tools, counting, errors."""

from __future__ import annotations

import anthropic
from checks import KEY, MODEL, URL, WEATHER, WEATHER_QUESTION, check, raised, run
from pydantic import BaseModel

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
HELLO = [{"role": "user", "content": "Hello, who are you?"}]
ASK = [{"role": "user", "content": WEATHER_QUESTION}]
FUNCTION = WEATHER["function"]
TOOL = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
COMMON = {
    "model": MODEL,
    "max_tokens": 200,
    "extra_body": {"temperature": 0},
}  # its models take no temperature any more


@check
def a_message_answers_plain_and_streamed_alike() -> None:
    plain = client.messages.create(messages=HELLO, **COMMON)
    with client.messages.stream(messages=HELLO, **COMMON) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == plain.content[0].text
    assert final.stop_reason == plain.stop_reason == "end_turn"
    assert isinstance(plain.seed, int) and isinstance(final.seed, int)
    assert final.system_fingerprint == plain.system_fingerprint
    assert final.usage.output_tokens == plain.usage.output_tokens > 0


@check
def a_tool_is_used_and_its_result_is_read() -> None:
    answer = client.messages.create(messages=ASK, tools=[TOOL], **COMMON)
    assert answer.stop_reason == "tool_use"
    [use] = [block for block in answer.content if block.type == "tool_use"]
    assert use.input == {"city": "Paris"}
    result = {"type": "tool_result", "tool_use_id": use.id, "content": '{"temperature": 21}'}
    told = client.messages.create(
        messages=[*ASK, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}],
        tools=[TOOL],
        **COMMON,
    )
    assert "21" in told.content[0].text


@check
def a_streamed_tool_use_has_its_input() -> None:
    with client.messages.stream(messages=ASK, tools=[TOOL], tool_choice={"type": "any"}, **COMMON) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert "input_json" in kinds
    assert set(final.content[-1].input) == {"city"}


@check
def a_stop_sequence_ends_it() -> None:
    answer = client.messages.create(messages=HELLO, stop_sequences=["e"], **COMMON)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "e")


@check
def tokens_are_counted_as_they_are_used() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO, system="You are kind.")
    used = client.messages.create(messages=HELLO, system="You are kind.", **COMMON).usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


@check
def a_format_is_parsed() -> None:
    class Person(BaseModel):
        name: str
        age: int

    answer = client.messages.parse(messages=HELLO, output_format=Person, **COMMON)
    assert isinstance(answer.parsed_output, Person)


@check
def a_prefix_is_read_from_the_cache_whatever_the_billing_line_says() -> None:
    words = " ".join(f"word {i}," for i in range(60))
    for i in range(2):
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={i}{i}{i};"}
        system = [billing, {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}]
        usage = client.messages.create(messages=HELLO, system=system, **COMMON).usage
    assert usage.cache_read_input_tokens > usage.input_tokens


@check
def anthropics_own_tools_are_used_and_hosted_ones_are_told() -> None:
    tools = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "memory_20250818", "name": "memory"},
    ]
    choice = {"type": "tool", "name": "bash"}
    raw = client.messages.with_raw_response.create(messages=ASK, tools=tools, tool_choice=choice, **COMMON)
    assert "web_search" in raw.headers["x-inferd-warning"]
    assert [block.name for block in raw.parse().content] == ["bash"]
    refused = raised(
        anthropic.BadRequestError,
        lambda: client.messages.create(
            messages=ASK, tools=tools, tool_choice={"type": "tool", "name": "web_search"}, **COMMON
        ),
    )
    assert "tool_choice.name" in refused.body["error"]["message"]


@check
def a_tool_is_loaded_by_its_reference() -> None:
    search = {"name": "find_tool", "input_schema": {"type": "object"}}
    use = {"type": "tool_use", "id": "toolu_1", "name": "find_tool", "input": {}}
    found = {"type": "tool_reference", "tool_name": TOOL["name"]}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [found]}
    turns = [*ASK, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    tools = [search, {**TOOL, "defer_loading": True}]
    counts = [
        client.beta.messages.count_tokens(model=MODEL, messages=turns[:n], tools=tools).input_tokens for n in (1, 3)
    ]
    plain = client.beta.messages.count_tokens(model=MODEL, messages=ASK, tools=[search, TOOL]).input_tokens
    assert counts[0] < plain < counts[1]


@check
def an_image_is_refused_when_it_is_new_and_left_out_when_it_is_not() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    new = [{"role": "user", "content": [image]}]
    refused = raised(anthropic.BadRequestError, lambda: client.messages.create(messages=new, **COMMON))
    assert "text alone" in refused.body["error"]["message"]
    raw = client.messages.with_raw_response.create(messages=[*new, *HELLO], **COMMON)
    assert "(1 image)" in raw.headers["x-inferd-warning"]
    assert raw.parse().content[0].text


@check
def a_token_is_a_key_too() -> None:
    bearer = anthropic.Anthropic(base_url=URL, auth_token=KEY, api_key=None, max_retries=0)
    assert bearer.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens > 0


@check
def errors_have_their_classes() -> None:
    unknown = raised(
        anthropic.NotFoundError, lambda: client.messages.create(messages=HELLO, model="nobody", max_tokens=9)
    )
    assert unknown.body["error"]["type"] == unknown.type == "not_found_error"
    assert unknown.request_id == unknown.body["request_id"]
    stranger = anthropic.Anthropic(base_url=URL, api_key="wrong", max_retries=0)
    refused = raised(anthropic.AuthenticationError, lambda: stranger.messages.create(messages=HELLO, **COMMON))
    assert refused.body["error"]["type"] == "authentication_error"


run()
