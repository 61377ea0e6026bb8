"""/v1/completions: prompts of every form, echo, and the scoring that evaluation harnesses rely on."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import httpx
import openai
import pytest


def test_text_and_ids_are_one_prompt(client: openai.OpenAI, router: Any) -> None:
    ids = router.model.tokenizer.encode("Once upon", True)
    prompts: list[Any] = ["Once upon", ["Once upon"], list(ids), [list(ids)]]
    for prompt in prompts:
        answer = client.completions.create(model="tiny", prompt=prompt)
        assert answer.object == "text_completion"
        assert answer.choices[0].text == "Hello there, this is an answer."
    assert [submit.prompt_ids for submit in router.submits] == [ids] * 4
    assert {submit.params.max_tokens for submit in router.submits} == {16}


def test_a_stream_says_what_a_plain_answer_says(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text="one two \U0001f600 three", cuts=(1, 2, 64)))
    asked: Any = {"model": "tiny", "prompt": "x", "echo": True, "logprobs": 2, "stop": "three", "max_tokens": 40}
    plain = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == plain.choices[0].text == "xone two \U0001f600 "
    assert chunks[-1].usage == plain.usage
    assert plain.choices[0].logprobs is not None
    whole = plain.choices[0].logprobs.model_dump()
    parts = [chunk.choices[0].logprobs.model_dump() for chunk in chunks[:-1] if chunk.choices[0].logprobs]
    assert {key: [value for part in parts for value in part[key]] for key in whole} == whole


def test_offsets_point_into_the_text(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text="caf\u00e9 \U0001f600 end"))
    answer = client.completions.create(model="tiny", prompt="Hello there", echo=True, logprobs=1, max_tokens=40)
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.text_offset is not None
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        if not token.startswith(("bytes:", "<|im_end|>")):
            assert choice.text[offset:].startswith(token)


def first_token(router: Any) -> str:
    """Text of the answer if a test sets no other."""
    tokenizer = router.model.tokenizer
    return str(tokenizer.decode(tokenizer.encode("Hello there", False)[:1], skip_special=True))


def scored_by_harness(choice: dict[str, Any], context: int) -> tuple[float, bool]:
    """Reads a choice like lm-evaluation-harness: (sum of log probabilities, whether the continuation is greedy)."""
    logprobs = choice["logprobs"]
    tokens, tops = logprobs["token_logprobs"][context:-1], logprobs["top_logprobs"][context:-1]
    greedy = all(
        token == max(top, key=top.get) for token, top in zip(logprobs["tokens"][context:-1], tops, strict=True)
    )
    return sum(tokens), greedy


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_harness_scores_a_batch_of_prompts_as_ids(http: httpx.Client, router: Any, max_tokens: int) -> None:
    texts = ["The quick brown", "one two three four"]
    ids = [list(router.model.tokenizer.encode(text, False)) for text in texts]
    body = {
        "model": "tiny",
        "prompt": ids,
        "echo": True,
        "logprobs": 1,
        "max_tokens": max_tokens,
        "temperature": 0,
        "seed": 1,
    }
    answer = http.post("/v1/completions", json=body).json()
    for i, (choice, text) in enumerate(zip(answer["choices"], texts, strict=True)):
        logprobs = choice["logprobs"]
        length = len(ids[i]) + max_tokens
        assert choice["index"] == i
        assert choice["text"].startswith(text)
        assert [len(logprobs[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [
            length
        ] * 4
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        assert "".join(logprobs["tokens"][: len(ids[i])]) == text
        end = len(ids[i]) - 1 + max_tokens
        assert scored_by_harness(choice, 1) == (-1.5 * (end - 1), False)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert answer["usage"]["completion_tokens"] == 2 * max_tokens


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_offsets_of_an_echoed_text_count_its_special_tokens(
    http: httpx.Client, router: Any, skips: bool, is_stream: bool
) -> None:
    text = "<|im_start|>user\nhi<|im_end|>"
    ids = list(router.model.tokenizer.encode(text, True))
    body = {
        "prompt": text, "echo": True, "logprobs": 0, "max_tokens": 1, "skip_special_tokens": skips, "stream": is_stream,
    }  # fmt: skip
    answer = http.post("/v1/completions", json=body)
    bodies = re.findall(r"^(?:data: )?({.*)$", answer.text, re.MULTILINE)
    choices = [choice for body in bodies for choice in json.loads(body)["choices"]]
    said = "".join(choice["text"] for choice in choices)
    logged = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    offsets = [offset for logprobs in logged for offset in logprobs["text_offset"]]
    tokens = [token for logprobs in logged for token in logprobs["tokens"]]
    assert said.startswith(text)
    assert [said[a:b] for a, b in itertools.pairwise((*offsets, len(said)))] == tokens
    assert len(offsets) == len(ids) + 1


def test_the_chosen_token_is_always_among_the_likely_ones(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(token_ids=(100, 101)))
    for asked, size in ((0, 1), (1, 2), (3, 3)):
        answer = client.completions.create(model="tiny", prompt="x", logprobs=asked, max_tokens=1)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert logprobs.top_logprobs is not None
        assert len(logprobs.top_logprobs[0]) == size
        assert logprobs.top_logprobs[0][logprobs.tokens[0]] == -1.5


def test_choices_are_numbered_by_prompt(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(*(script(text=text) for text in ("a0", "a1", "b0", "b1")))
    answer = client.completions.create(model="tiny", prompt=["first", "second"], n=2, seed=9)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    seeds = [submit.params.seed for submit in router.submits]
    assert seeds[:2] == seeds[2:]
    assert seeds[0] == 9 != seeds[1]


def test_echo_without_scores(client: openai.OpenAI, router: Any) -> None:
    ids = list(router.model.tokenizer.encode("Once upon", False))
    first = first_token(router)
    for prompt in ("Once upon", ids):
        answer = client.completions.create(model="tiny", prompt=prompt, echo=True, max_tokens=1)
        assert answer.choices[0].text == "Once upon" + first
        assert answer.choices[0].logprobs is None
    assert all(submit.params.prompt_logprobs is None for submit in router.submits)


def test_prompt_scores_without_echo(http: httpx.Client, router: Any) -> None:
    answer = http.post("/v1/completions", json={"prompt": [5, 6, 7], "prompt_logprobs": 0, "max_tokens": 1}).json()
    scored = answer["choices"][0]["prompt_logprobs"]
    assert [entry and list(entry) for entry in scored] == [None, ["6"], ["7"]]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["choices"][0]["text"] == first_token(router)


def test_token_ids_are_returned(http: httpx.Client, router: Any, script: Any) -> None:
    router.will(script(token_ids=(40, 41, 42)))
    body = {"prompt": [[5], [6, 7]], "return_token_ids": True, "max_tokens": 2}
    answer = http.post("/v1/completions", json=body).json()
    found = [(choice["prompt_token_ids"], choice["token_ids"]) for choice in answer["choices"]]
    assert found == [([5], [40, 41]), ([6, 7], [40, 41])]


def test_special_tokens_are_shown_only_where_asked_for(client: openai.OpenAI, router: Any, script: Any) -> None:
    start = router.model.tokenizer.encode("<|im_start|>", False)
    assert len(start) == 1
    router.will(script(token_ids=(*start, *router.model.tokenizer.encode("hi", False))))
    for skip, text in ((True, "hi"), (False, "<|im_start|>hi")):
        answer = client.completions.create(model="tiny", prompt="x", extra_body={"skip_special_tokens": skip})
        assert answer.choices[0].text == text
