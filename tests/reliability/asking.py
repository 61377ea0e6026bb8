"""Requests of every kind at once, and what their answers come to when the places where they were cut are forgotten."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

Json = dict[str, Any]
TIMEOUT_S = 600.0
"""Without a byte: a plain answer may be hit by many kills in a row on a busy machine."""

_DELTA_TEXTS = ("content", "text", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Its seed is its own, so that its answer is."""

    path: str
    body: Json


@dataclass(slots=True)
class Answer:
    """What came, comparable with another run's, and when."""

    status: int = 0
    choices: dict[int, Json] = field(default_factory=dict)
    usage: Json | None = None
    error: Json | None = None
    data: Any = None
    times_s: list[float] = field(default_factory=list)
    """When each event of a stream came."""

    @property
    def said(self) -> tuple[object, ...]:
        """All but the times."""
        return self.status, self.choices, self.usage, self.error, self.data

    @property
    def gaps_s(self) -> list[float]:
        """From each event to the next."""
        return [later - earlier for earlier, later in pairwise(self.times_s)]


class Asker:
    """An event loop of its own for many answers at once."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, asks: Sequence[Ask]) -> list[Answer]:
        """All at once."""
        return asyncio.run(self.ask_all(asks))

    async def ask_all(self, asks: Sequence[Ask]) -> list[Answer]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_S, limits=limits) as client:
            return list(await asyncio.gather(*(ask_one(client, ask) for ask in asks)))


async def ask_one(client: httpx.AsyncClient, ask: Ask) -> Answer:
    """By a client that the caller keeps; a path may be a whole URL."""
    answer = Answer()
    async with client.stream("POST", ask.path, json=ask.body) as response:
        answer.status = response.status_code
        if ask.body.get("stream") and response.status_code == 200:
            await _read_events(response, answer)
            return answer
        whole = json.loads(await response.aread())
    answer.error, answer.usage, answer.data = whole.get("error"), whole.get("usage"), whole.get("data")
    for choice in whole.get("choices", ()):
        answer.choices[choice["index"]] = flat(choice)
    return answer


async def _read_events(response: httpx.Response, answer: Answer) -> None:
    is_done = False
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        assert not is_done, "something came after [DONE]"
        if line == "data: [DONE]":
            is_done = True
            continue
        answer.times_s.append(time.monotonic())
        event = json.loads(line.removeprefix("data: "))
        answer.error = event.get("error") or answer.error
        answer.usage = event.get("usage") or answer.usage
        for choice in event.get("choices", ()):
            join(answer.choices.setdefault(choice["index"], {}), flat(choice))
    assert is_done or answer.error, "a stream ended without [DONE]"


def flat(choice: Json) -> Json:
    """A choice, or a piece of one: its texts, ids, scores, calls and end."""
    said = choice.get("message") or choice.get("delta") or choice
    values: Json = {name: said[name] for name in _DELTA_TEXTS if said.get(name)}
    calls = said.get("tool_calls") or ()
    if calls:
        values["names"] = "".join(call["function"].get("name") or "" for call in calls)
        values["arguments"] = "".join(call["function"].get("arguments") or "" for call in calls)
    for name in ("token_ids", "prompt_logprobs", "finish_reason"):
        if choice.get(name):
            values[name] = choice[name]
    for name, scores in (choice.get("logprobs") or {}).items():
        values[f"logprobs.{name}"] = scores or []
    return values


def join(whole: Json, piece: Json) -> None:
    """Add what a later event of a stream says to what those before it said."""
    for name, value in piece.items():
        whole[name] = whole[name] + value if name in whole and name != "finish_reason" else value


def asked_under(fault: Callable[[], None], asker: Asker, asks: Sequence[Ask]) -> list[Answer]:
    """What is answered while `fault` runs beside, on a thread."""
    thread = threading.Thread(target=fault)
    thread.start()
    answers = asker.ask(asks)
    thread.join()
    return answers


def longest_pause_s(answers: Sequence[Answer], since_s: float) -> float:
    """The longest that any stream was silent after `since_s`, counted from then; 0.0 where none was open."""
    pauses = [
        later - max(earlier, since_s)
        for answer in answers
        for earlier, later in pairwise(answer.times_s)
        if later > since_s
    ]
    return max(pauses, default=0.0)
