"""Requests for the time in which engines die: every kind of answer, each long enough to be hit."""

from __future__ import annotations

from typing import Any

from tests.reliability.asking import Ask

_USER: Any = [{"role": "user", "content": "Tell me about rivers."}]
_PERSON: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 20, "maxLength": 40},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 8, "maxItems": 12},
        "age": {"type": "integer"},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}
_TOOL: Any = {"type": "function", "function": {"name": "save_person", "parameters": _PERSON, "strict": True}}
_USAGE: Any = {"include_usage": True}
FREE_ID, NUM_FREE_IDS = 300, 1000
"""A free model's token at position p is `FREE_ID` + p mod `NUM_FREE_IDS`."""


def mixed(seed: int) -> list[Ask]:
    """One request of each kind."""
    text = {"prompt": f"Once upon a time, {seed} ", "seed": seed, "return_token_ids": True, "temperature": 1.0}
    long = {**text, "max_tokens": 240, "ignore_eos": True}
    chat = {"messages": _USER, "seed": seed, "return_token_ids": True, "temperature": 1.0}
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": _PERSON, "strict": True}}
    streamed = {"stream": True, "stream_options": _USAGE}
    return [
        Ask("/v1/completions", {**long, **streamed, "logprobs": 3}),
        Ask("/v1/completions", {**long, "n": 3, "logprobs": 1}),
        Ask("/v1/completions", {**long, **streamed, "n": 2, "stop": ["qqq", " the end of"], "repetition_penalty": 1.1}),
        Ask("/v1/completions", {**long, "echo": True, "logprobs": 2, "presence_penalty": 0.5}),
        Ask("/v1/chat/completions", {**chat, **streamed, "max_tokens": 200, "ignore_eos": True, "stop": "."}),
        Ask("/v1/chat/completions", {**chat, "response_format": schema, "max_tokens": 300}),
        Ask("/v1/chat/completions", {**chat, **streamed, "response_format": schema, "max_tokens": 300}),
        Ask(
            "/v1/chat/completions", {**chat, **streamed, "tools": [_TOOL], "tool_choice": "required", "max_tokens": 300}
        ),
        Ask("/v1/embeddings", {"input": f"river {seed}", "encoding_format": "float"}),
    ]


def streams(num_streams: int, max_tokens: int) -> list[Ask]:
    """Plain streams that differ only in seed and length. Answers of a free model depend on the length alone."""
    body = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 1.0, "stream": True, "return_token_ids": True}
    return [
        Ask("/v1/completions", {**body, "prompt": "Stream" + " on" * i + ":", "seed": i, "stream_options": _USAGE})
        for i in range(num_streams)
    ]


def free_answer(num_prompt: int, num_tokens: int) -> list[int]:
    """The answer of a free model to a prompt of so many tokens."""
    return [FREE_ID + position % NUM_FREE_IDS for position in range(num_prompt, num_prompt + num_tokens)]


def copies(num_requests: int, max_tokens: int) -> list[Ask]:
    """Streams for a free model whose answer repeats all of its prompt, and then goes on with what was not there."""
    body = {"max_tokens": max_tokens, "ignore_eos": True, "stream": True, "return_token_ids": True}
    prompts = [free_answer(num_prompt, num_prompt) for num_prompt in range(40, 40 + num_requests)]
    return [Ask("/v1/completions", {**body, "prompt": prompt, "stream_options": _USAGE}) for prompt in prompts]
