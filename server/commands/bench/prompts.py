"""Makes the requests of a load run. The same options make the same requests, which differ after a shared prefix.

Prompt ids are drawn from the ids that the server's tokenizer gives for a page of text, so that they are ordinary ids of
any model. Chats, and completions for a server that accepts no ids, are words of that page. How many words make the
wanted number of tokens is measured once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import orjson

from inferd.engine.api.errors import ConfigError
from inferd.server.commands.bench.client import Client, ClientError
from inferd.server.commands.bench.options import LoadOptions

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


class PromptSource(Protocol):
    """Makes the part of a request that holds its prompt."""

    def fields(self, index: int, num_tokens: int) -> dict[str, Any]: ...


class IdPrompts:
    """Random token ids: a shared prefix, then ids that only request `index` has."""

    def __init__(self, options: LoadOptions, ids: Sequence[int]) -> None:
        self._seed, self._ids = options.seed, ids
        self._prefixes = _prefixes(options, ids, options.shared_prefix)

    def fields(self, index: int, num_tokens: int) -> dict[str, Any]:
        prefix = self._prefixes[index % len(self._prefixes)][:num_tokens]
        rng = random.Random(f"{self._seed}/{index}")
        return {"prompt": prefix + rng.choices(self._ids, k=num_tokens - len(prefix))}


class WordPrompts:
    """Random words of about the wanted number of tokens, as one user message or as a text to complete."""

    def __init__(self, options: LoadOptions, words_per_token: float) -> None:
        self._words, self._words_per_token = PAGE.split(), words_per_token
        self._seed, self._is_chat = options.seed, options.api == "chat"
        self._prefixes = _prefixes(options, self._words, round(options.shared_prefix * words_per_token))

    def fields(self, index: int, num_tokens: int) -> dict[str, Any]:
        num_words = max(1, round(num_tokens * self._words_per_token))
        prefix = self._prefixes[index % len(self._prefixes)][:num_words]
        rng = random.Random(f"{self._seed}/{index}")
        text = " ".join(prefix + rng.choices(self._words, k=num_words - len(prefix)))
        return {"messages": [{"role": "user", "content": text}]} if self._is_chat else {"prompt": text}


Item = TypeVar("Item")


def _prefixes(options: LoadOptions, items: Sequence[Item], length: int) -> list[list[Item]]:
    """The shared prefixes. The first one does not depend on how many there are."""
    names = ["prefix", *(f"prefix/{number}" for number in range(1, options.num_prefixes))]
    return [random.Random(f"{options.seed}/{name}").choices(items, k=length) for name in names]


async def make_prompts(options: LoadOptions, client: Client, model: str) -> PromptSource:
    """Choose the prompts, with the help of the server's tokenizer. Raises `ConfigError` if that gives no ids."""
    if options.api == "chat" or options.prompts == "words":
        num_tokens = await _count_page(options, client, model)
        return WordPrompts(options, len(PAGE.split()) / num_tokens)
    if options.vocab_size is not None:
        return IdPrompts(options, range(options.vocab_size))
    ids = await _tokenize(client, model)
    if ids is None:
        raise ConfigError("/tokenize did not answer with ids; give --vocab-size or --prompts words, which need none")
    return IdPrompts(options, sorted(set(ids)))


async def _count_page(options: LoadOptions, client: Client, model: str) -> int:
    """Number of tokens of the page, by the tokenizer or else by the usage of one request with the page as prompt."""
    ids = await _tokenize(client, model)
    if ids is not None:
        return len(ids)
    content = {"messages": [{"role": "user", "content": PAGE}]} if options.api == "chat" else {"prompt": PAGE}
    try:
        reply = await client.post(options.path, orjson.dumps({"model": model, **content, "max_tokens": 1}))
    except ClientError as error:
        raise ConfigError(f"the server's tokens cannot be counted: {error}") from error
    if reply.status != 200:
        raise ConfigError(f"the server's tokens cannot be counted: {options.path} answered {reply.status}")
    try:
        num_tokens = int(orjson.loads(reply.body)["usage"]["prompt_tokens"])
    except (ValueError, LookupError, TypeError):
        num_tokens = 0
    if num_tokens < 1:
        raise ConfigError(
            f"the server's tokens cannot be counted: {options.path} answered without usage.prompt_tokens above 0, and "
            "/tokenize answered without ids; one of the two is needed"
        )
    return num_tokens


async def _tokenize(client: Client, model: str) -> list[int] | None:
    """Token ids of the page, or None if the server's /tokenize is missing or answers something else."""
    body = {"model": model, "prompt": PAGE, "add_special_tokens": False}
    try:
        reply = await client.post("/tokenize", orjson.dumps(body))
        said = orjson.loads(reply.body) if reply.status == 200 else None
    except ClientError as error:
        raise ConfigError(f"/tokenize did not answer: {error}") from error
    except orjson.JSONDecodeError:
        return None
    ids = said.get("tokens") if isinstance(said, dict) else None
    return ids if isinstance(ids, list) and ids and all(type(item) is int for item in ids) else None


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request, ready to send."""

    body: bytes
    output_len: int


def load_requests(
    options: LoadOptions, model: str, prompts: PromptSource, first: int, count: int
) -> Iterator[LoadRequest]:
    """Requests `first` to `first + count - 1`, each streamed with an exact output length, usage and token ids."""
    for index in range(first, first + count):
        rng = random.Random(f"{options.seed}/{index}/lengths")
        input_len, output_len = options.input_len.draw(rng), options.output_len.draw(rng)
        body = {
            "model": model,
            **prompts.fields(index, input_len),
            "max_tokens": output_len,
            "ignore_eos": True,
            "temperature": options.temperature,
            "seed": options.seed + index,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        yield LoadRequest(orjson.dumps(body), output_len)
