"""Sends requests of every kind at once, and makes their answers comparable, however they were cut into chunks."""

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
"""Maximum seconds without a byte. On a busy machine many kills in a row may hit a plain answer."""

_DELTA_TEXTS = ("content", "text", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Its own seed makes its answer unique."""

    path: str
    body: Json


@dataclass(slots=True)
class Answer:
    """An answer that can be compared with another run's, and the times of its parts."""

    status: int = 0
    choices: dict[int, Json] = field(default_factory=dict)
    usage: Json | None = None
    error: Json | None = None
    data: Any = None
    times_s: list[float] = field(default_factory=list)
    """Times at which the events of a stream came."""

    @property
    def said(self) -> tuple[object, ...]:
        """The answer without its times."""
        return self.status, self.choices, self.usage, self.error, self.data

    @property
    def gaps_s(self) -> list[float]:
        """Seconds from each event to the next."""
        return [later - earlier for earlier, later in pairwise(self.times_s)]


class Asker:
    """Asks for many answers at once, on its own event loop."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, asks: Sequence[Ask]) -> list[Answer]:
        """Ask for all answers at once."""
        return asyncio.run(self.ask_all(asks))

    async def ask_all(self, asks: Sequence[Ask]) -> list[Answer]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_S, limits=limits) as client:
            return list(await asyncio.gather(*(ask_one(client, ask) for ask in asks)))


async def ask_one(client: httpx.AsyncClient, ask: Ask) -> Answer:
    """Asks with the caller's client. A path may be a whole URL."""
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
    """A choice or a part of one: its texts, ids, scores, calls and end."""
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
    """Add a later event of a stream to the events before it."""
    for name, value in piece.items():
        whole[name] = whole[name] + value if name in whole and name != "finish_reason" else value


def asked_under(fault: Callable[[], None], asker: Asker, asks: Sequence[Ask]) -> list[Answer]:
    """The answers while `fault` runs on a thread."""
    thread = threading.Thread(target=fault)
    thread.start()
    answers = asker.ask(asks)
    thread.join()
    return answers


def pauses_s(answers: Sequence[Answer], since_s: float) -> list[float]:
    """The longest silence of each stream after `since_s`, counted from then, if it was open."""
    silences = [
        [later - max(earlier, since_s) for earlier, later in pairwise(answer.times_s) if later > since_s]
        for answer in answers
    ]
    return [max(each) for each in silences if each]
