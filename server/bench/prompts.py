"""The requests of a load run: the same for the same options, and different from one another beyond the shared prefix.

Prompt ids are drawn from what the server's own tokenizer makes of a page of text, so that every id is an ordinary one
on any model. Chat prompts are words of that page; how many make the length asked for is measured once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Protocol

import orjson

from inferd.engine.api.errors import ConfigError
from inferd.server.bench.client import Client, ClientError
from inferd.server.bench.options import LoadOptions

PAGE = (
    "The mill stood where the river bent, and every morning its wheel began to turn before the baker lit his oven. "
    "Grain went in at the top, was lifted by a chain of small buckets, and came down between two stones as flour. A "
    "sack took nine minutes when the water was high, and nearly twenty in a dry August. The miller kept a notebook. "
    "On one page he wrote the hour at which each farmer came, on the next the hour at which he left, and in the "
    "margin how long the queue had been. After a year he could say which days would be slow, and why: not because "
    "the stones were worn, as people liked to think, but because everybody arrived at eight. So he painted a board "
    "and hung it by the road. Come at ten, it said, and you will be home before those who came at eight. Some "
    "laughed, some tried it, and by spring the yard was quiet. His daughter asked whether the mill had become "
    "faster. No, he answered, it grinds exactly as it did; it is only that nobody waits for anybody else. She "
    "thought about this while feeding the horses, then measured the wheel, the belt and the chute, drew them to "
    "scale, and found a place where flour had to climb a step for no reason. They took the step away. That, she "
    "said, is faster. And both of them were right."
)


class Prompts(Protocol):
    """Makes the part of a request that says what to complete."""

    def fields(self, index: int) -> dict[str, Any]: ...


class IdPrompts:
    """Random token ids: the shared prefix first, then ids of request `index` alone."""

    def __init__(self, options: LoadOptions, ids: list[int]) -> None:
        self._options, self._ids = options, ids
        self._prefix = random.Random(f"{options.seed}/prefix").choices(ids, k=options.shared_prefix)

    def fields(self, index: int) -> dict[str, Any]:
        rng = random.Random(f"{self._options.seed}/{index}")
        return {"prompt": self._prefix + rng.choices(self._ids, k=self._options.input_len - len(self._prefix))}


class ChatPrompts:
    """One user message of random words, as many as make about the length asked for."""

    def __init__(self, options: LoadOptions, words_per_token: float) -> None:
        self._words = PAGE.split()
        self._num_words = max(1, round(options.input_len * words_per_token))
        num_prefix = min(self._num_words, round(options.shared_prefix * words_per_token))
        self._prefix = random.Random(f"{options.seed}/prefix").choices(self._words, k=num_prefix)
        self._seed = options.seed

    def fields(self, index: int) -> dict[str, Any]:
        rng = random.Random(f"{self._seed}/{index}")
        words = self._prefix + rng.choices(self._words, k=self._num_words - len(self._prefix))
        return {"messages": [{"role": "user", "content": " ".join(words)}]}


async def make_prompts(options: LoadOptions, client: Client, model: str) -> Prompts:
    """Ask the server's tokenizer what an ordinary id is. Raises `ConfigError` where it cannot say."""
    if options.api == "completions" and options.vocab_size is not None:
        return IdPrompts(options, list(range(options.vocab_size)))
    ids = await _tokenize(client, model)
    if options.api == "chat":
        return ChatPrompts(options, len(PAGE.split()) / len(ids))
    return IdPrompts(options, sorted(set(ids)))


async def _tokenize(client: Client, model: str) -> list[int]:
    body = {"model": model, "prompt": PAGE, "add_special_tokens": False}
    try:
        reply = await client.post("/tokenize", orjson.dumps(body))
    except ClientError as error:
        raise ConfigError(f"/tokenize did not answer: {error}") from error
    if reply.status != 200:
        raise ConfigError(
            f"/tokenize answered {reply.status}; give --vocab-size with --api completions to do without it"
        )
    ids: list[int] = orjson.loads(reply.body)["tokens"]
    return ids


def request_bodies(options: LoadOptions, model: str, prompts: Prompts, first: int, count: int) -> Iterator[bytes]:
    """JSON bodies of requests `first` to `first + count - 1`: streamed, of exact length, with usage and token ids."""
    for index in range(first, first + count):
        body = {
            "model": model,
            **prompts.fields(index),
            "max_tokens": options.output_len,
            "ignore_eos": True,
            "temperature": options.temperature,
            "seed": options.seed + index,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        yield orjson.dumps(body)
