"""/v1/chat/completions through the official client, which must parse exactly what was generated, streamed or not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

MESSAGES: Any = [{"role": "user", "content": "What are you?"}]
CUTS = [(1,), (2, 3), (64,), (5, 1)]


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[str, list[Any]]:
    chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **fields))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    return text, chunks


def test_a_plain_answer(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text="I am an example.", num_cached=3))
    raw = client.chat.completions.with_raw_response.create(model="alias", messages=MESSAGES, seed=41)
    answer = raw.parse()
    submit = router.submits[0]
    ids = router.model.tokenizer.encode("I am an example.", False)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "alias"
    assert answer.choices[0].message.content == "I am an example."
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    usage = answer.usage.model_dump(exclude_none=True)
    assert usage == {
        "prompt_tokens": len(submit.prompt_ids),
        "completion_tokens": len(ids) + 1,
        "total_tokens": len(submit.prompt_ids) + len(ids) + 1,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert answer.system_fingerprint is not None
    assert answer.system_fingerprint.startswith("fp_")
    assert answer.model_extra is not None
    assert answer.model_extra["seed"] == 41 == submit.params.seed
    assert raw.headers["x-request-id"]


def test_a_seed_is_chosen_and_returned(client: openai.OpenAI, router: Any) -> None:
    first, second = (client.chat.completions.create(model="tiny", messages=MESSAGES) for _ in range(2))
    assert first.model_extra is not None
    assert second.model_extra is not None
    seeds = [first.model_extra["seed"], second.model_extra["seed"]]
    assert seeds == [submit.params.seed for submit in router.submits]
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize("cuts", CUTS)
def test_a_stream_says_what_a_plain_answer_says(client: openai.OpenAI, router: Any, script: Any, cuts: Any) -> None:
    router.will(script(text="caf\u00e9 \u20ac5 \U0001f600 done", cuts=cuts))
    plain = client.chat.completions.create(model="tiny", messages=MESSAGES, seed=1)
    text, chunks = streamed(client, seed=1)
    assert text == plain.choices[0].message.content == "caf\u00e9 \u20ac5 \U0001f600 done"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({(chunk.id, chunk.created, chunk.system_fingerprint, chunk.model) for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" and chunk.usage is None for chunk in chunks)


def test_usage_comes_only_where_asked_for(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text="one two", num_cached=2))
    plain = client.chat.completions.create(model="tiny", messages=MESSAGES)
    _, chunks = streamed(client, stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage == plain.usage
    assert all(chunk.choices and chunk.usage is None for chunk in chunks[:-1])
    _, chunks = streamed(client, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert plain.usage is not None
    assert counts == sorted(counts)
    assert counts[0] == 0, "who speaks is no token"
    assert counts[-1] == plain.usage.completion_tokens


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stop", [None, ["ne twx"], ["tw", "\U0001f600 done"]])
def test_usage_counts_the_tokens_whose_text_is_out(
    http: httpx.Client, router: Any, script: Any, cuts: Any, path: str, stop: list[str] | None
) -> None:
    text = "one two caf\u00e9 \U0001f600\U0001f600 done"
    table = router.model.tokenizer.bytes
    pieces = [table.of(token_id) for token_id in router.model.tokenizer.encode(text, False)]
    router.will(script(text=text, cuts=cuts))
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "x", "messages": MESSAGES}
    body.pop("messages" if path == "/v1/completions" else "prompt")
    answer = http.post(path, json={**body, "stop": stop, "stream": True, "stream_options": options, "max_tokens": 99})
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks[:-2]]
    texts = [choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices]
    for i, chunk in enumerate(chunks[:-2]):
        said = "".join(texts[: i + 1]).encode()
        num_tokens = chunk["usage"]["completion_tokens"]
        is_all = not "".join(texts[i + 1 :])  # a stop string may have ended it inside a token
        assert is_all or len(b"".join(pieces[:num_tokens])) <= len(said), "never ahead"
        # The end's own token has no text, and counts once all text is out.
        assert len(said) < len(b"".join([*pieces, b"end"][: num_tokens + 1])) or num_tokens > len(pieces), "nor behind"
    assert chunks[-2]["usage"] == chunks[-1]["usage"], "the chunk with the reason counts all"


@pytest.mark.parametrize("cuts", CUTS)
def test_a_stop_string_is_never_seen(client: openai.OpenAI, router: Any, script: Any, cuts: Any) -> None:
    router.will(script(text="count: one two three four five", cuts=cuts))
    for stop, shown in (("three", "count: one two "), ("e t", "count: on"), (["five", "two"], "count: one ")):
        plain = client.chat.completions.create(model="tiny", messages=MESSAGES, stop=stop)
        text, chunks = streamed(client, stop=stop, stream_options={"include_usage": True})
        assert plain.choices[0].message.content == text == shown
        assert plain.choices[0].finish_reason == chunks[-2].choices[0].finish_reason == "stop"
        assert plain.choices[0].model_extra is not None
        assert plain.choices[0].model_extra["stop_reason"] == (stop if isinstance(stop, str) else "two")
        assert plain.usage == chunks[-1].usage


def test_tokens_after_a_stop_string_are_not_counted_and_the_engine_stops(
    client: openai.OpenAI, router: Any, script: Any
) -> None:
    router.will(script(text="one two three four five", cuts=(64,), ends=False))
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, stop=" three")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(router.model.tokenizer.encode("one two three", False))
    router.wait_for(lambda: list(router.aborted.values()) == ["stop"])


def test_a_choice_that_stopped_early_waits_for_the_others(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text="one two three", ends=False), script(text="first second third fourth one more"))
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, n=2, stop=" t")
    assert [choice.message.content for choice in answer.choices] == ["one", "first second"]
    router.wait_for(lambda: set(router.aborted.values()) == {"stop"})


def test_cached_tokens_are_those_of_a_prompts_first_choice(client: openai.OpenAI, router: Any, script: Any) -> None:
    """Further choices find what the first one has just computed. That is no saving for the caller."""
    router.will(script(num_cached=3), script(num_cached=10))
    plain = client.chat.completions.create(model="tiny", messages=MESSAGES, n=2)
    router.reset()
    router.will(script(num_cached=3), script(num_cached=10))
    _, chunks = streamed(client, n=2, stream_options={"include_usage": True})
    assert plain.usage is not None
    assert plain.usage.prompt_tokens_details is not None
    assert plain.usage.prompt_tokens_details.cached_tokens == 3
    assert chunks[-1].usage == plain.usage


def test_a_stop_string_can_be_kept(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text="one two three"))
    extra = {"include_stop_str_in_output": True}
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, stop="two", extra_body=extra)
    assert answer.choices[0].message.content == "one two"


def test_a_stop_token_is_named(client: openai.OpenAI, router: Any, script: Any) -> None:
    ids = router.model.tokenizer.encode("one two", False)
    router.will(script(token_ids=ids))
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"stop_token_ids": [ids[-1]]})
    assert answer.choices[0].message.content == router.model.tokenizer.decode(ids[:-1], skip_special=True)
    assert answer.choices[0].model_extra == {"stop_reason": ids[-1]}


def test_choices_have_their_own_text_seed_and_id(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text="first"), script(text="second one"), script(text="and a third"))
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, n=3, seed=5)
    by_id = sorted(router.submits, key=lambda submit: submit.request_id)
    assert [choice.message.content for choice in answer.choices] == ["first", "second one", "and a third"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [submit.request_id.rpartition("-")[2] for submit in by_id] == ["0", "1", "2"]
    assert by_id[0].params.seed == 5
    assert len({submit.params.seed for submit in by_id}) == 3
    router.reset()
    router.will(script(text="first"), script(text="second one"), script(text="and a third"))
    texts = {0: "", 1: "", 2: ""}
    chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, n=3, seed=5, stream=True))
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "first", 1: "second one", 2: "and a third"}
    assert sum(chunk.choices[0].delta.role == "assistant" for chunk in chunks) == 3
    assert sum(chunk.choices[0].finish_reason == "stop" for chunk in chunks) == 3
    # A prompt that three choices continue is counted once.
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(by_id[0].prompt_ids)


def test_logprobs_are_of_every_token_with_its_bytes(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text="a\u20ac", cuts=(1, 64)))
    plain = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert plain.choices[0].logprobs is not None
    content = plain.choices[0].logprobs.content
    assert content is not None
    ids = [*router.model.tokenizer.encode("a\u20ac", False), router.model.eos_token_ids[0]]
    assert [bytes(token.bytes or ()) for token in content] == [router.model.tokenizer.bytes.of(i) for i in ids]
    assert [token.logprob for token in content] == [-1.5] * len(ids)
    assert all([top.logprob for top in token.top_logprobs] == [-0.5, -1.5] for token in content)
    assert all(token.top_logprobs[1].bytes == token.bytes for token in content)
    _, chunks = streamed(client, logprobs=True, top_logprobs=2)
    pieces = [chunk.choices[0].logprobs.content for chunk in chunks if chunk.choices[0].logprobs]
    assert [token for piece in pieces for token in piece] == content


def test_token_ids_are_returned(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text="one two three", cuts=(2,)))
    extra = {"return_token_ids": True}
    plain = client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=extra)
    ids = [*router.model.tokenizer.encode("one two three", False), router.model.eos_token_ids[0]]
    assert plain.choices[0].model_extra is not None
    assert plain.choices[0].model_extra["token_ids"] == ids
    assert plain.model_extra is not None
    assert plain.model_extra["prompt_token_ids"] == list(router.submits[0].prompt_ids)
    _, chunks = streamed(client, extra_body=extra)
    assert chunks[0].prompt_token_ids == list(router.submits[0].prompt_ids)
    assert [i for chunk in chunks for i in chunk.choices[0].model_extra.get("token_ids", ())] == ids


def test_prompt_logprobs(http: httpx.Client, router: Any) -> None:
    body = {"messages": MESSAGES, "prompt_logprobs": 2, "max_tokens": 1}
    answer = http.post("/v1/chat/completions", json=body).json()
    scored, ids = answer["prompt_logprobs"], router.submits[0].prompt_ids
    assert scored[0] is None
    assert [entry[str(i)]["rank"] for entry, i in zip(scored[1:], ids[1:], strict=True)] == [2] * (len(ids) - 1)
    assert all(len(entry) == 2 for entry in scored[1:])


def test_tools_and_earlier_calls_reach_the_model(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text="Two."))
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    messages: Any = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "1+1", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]  # fmt: skip
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=tools, tool_choice="auto")
    assert answer.choices[0].message.content == "Two."
    prompt = router.model.tokenizer.decode(router.submits[0].prompt_ids, skip_special=False)
    assert "Be\nbrief." in prompt
    assert '"a": 1' in prompt
    assert "add(" in prompt


def test_an_answer_can_be_sent_back_as_it_came(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES)
    again: Any = [*MESSAGES, answer.choices[0].message.model_dump(), *MESSAGES]
    assert client.chat.completions.create(model="tiny", messages=again).choices


def test_clients_run_side_by_side(url: str, router: Any, script: Any) -> None:
    router.will(*(script(text=f"answer {i}", cuts=(1,)) for i in range(16)))

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return list(await asyncio.gather(*(one() for _ in range(16))))

    assert sorted(asyncio.run(run())) == sorted(f"answer {i}" for i in range(16))


def test_the_clients_own_stream_helper(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text="one two three"))
    with client.chat.completions.stream(model="tiny", messages=MESSAGES) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "one two three"


def test_fields_without_effect_are_accepted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        extra_body={"spaces_between_special_tokens": False, "stop": None, "guided_json": None},
    )
    assert answer.choices
