"""Requests of every kind. Each has a unique mark in its prompt and an answer that depends only on the request.

Knows no server and no client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.reliability.asking import Ask
from tests.reliability.workloads import mixed

_MIXED = (
    "completion, streamed, logprobs",
    "completion, n=3",
    "completion, streamed, n=2, stop",
    "completion, echo",
    "chat, streamed, stop",
    "chat, JSON schema",
    "chat, streamed, JSON schema",
    "chat, streamed, tools",
    "embedding",
)
"""Kinds of the requests of `mixed`, in its order."""

_WORDS = (
    "rivers",
    "mills",
    "bridges",
    "old",
    "towns",
    "by",
    "the",
    "sea",
    "and",
    "ships",
    "far",
    "north",
    "of",
    "snow",
)
_LONG_PROMPT_WORDS = 700
_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True)
class Marked:
    """One request. Its mark identifies it, in its prompt and in the header that carries its id."""

    mark: str
    kind: str
    ask: Ask

    @property
    def is_streamed(self) -> bool:
        return bool(self.ask.body.get("stream"))


def round_of(seed: int) -> list[Marked]:
    """One request of each kind; every number gives other requests."""
    asks = [*zip(_MIXED, mixed(seed), strict=True), *_others(seed).items()]
    return [_mark(f"m{seed}x{number}z", kind, ask) for number, (kind, ask) in enumerate(asks)]


def _others(seed: int) -> Mapping[str, Ask]:
    """The remaining kinds: the other families, and a prompt that takes several steps."""
    long = " ".join(_WORDS[(seed + i * i) % len(_WORDS)] for i in range(_LONG_PROMPT_WORDS))
    text: dict[str, Any] = {"prompt": f"{seed}: {long}", "seed": seed, "temperature": 0.0, "return_token_ids": True}
    user = {"role": "user", "content": f"Tell me about {_WORDS[seed % 5]}."}
    chat = {"messages": [user], "seed": seed, "temperature": 0.8, "max_tokens": 120, "ignore_eos": True}
    message: dict[str, Any] = {"model": "tiny", "max_tokens": 120, "temperature": 0.0, "messages": [user]}
    item: dict[str, Any] = {"model": "tiny", "input": user["content"], "max_output_tokens": 120, "seed": seed}
    return {
        "completion, long prompt": Ask("/v1/completions", {**text, "max_tokens": 60, "ignore_eos": True}),
        "completion, long prompt, streamed": Ask("/v1/completions", {**text, **_USAGE, "max_tokens": 60}),
        "chat, logprobs": Ask("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 2}),
        "message": Ask("/v1/messages", message),
        "message, streamed": Ask("/v1/messages", {**message, "stream": True}),
        "response": Ask("/v1/responses", {**item, "ignore_eos": True}),
        "response, background": Ask("/v1/responses", {**item, "background": True, "ignore_eos": True}),
        "response, streamed": Ask("/v1/responses", {**item, "stream": True, "ignore_eos": True}),
    }


def _mark(mark: str, kind: str, ask: Ask) -> Marked:
    """The same request with the mark at the end of its prompt, so that the answer depends on the mark."""
    body = dict(ask.body)
    for name in ("prompt", "input"):
        if name in body:
            body[name] = f"{body[name]} {mark}"
    if "messages" in body:
        *turns, last = body["messages"]
        body["messages"] = [*turns, {**last, "content": f"{last['content']} {mark}"}]
    return Marked(mark, kind, Ask(ask.path, body))
