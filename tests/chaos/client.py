"""Sends requests as clients do, and as bad clients do, which leave early or read slowly. Records answers, judges
nothing.

A refused request is sent again if its answer says so, and as late as it says. Nothing else is sent again.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx

from tests.chaos.asks import Marked
from tests.chaos.history import Attempt, End, Event, History
from tests.reliability.asking import Json

SILENT_S = 240.0
"""Longer than any answer of the embedded model takes, even through several engines on a busy machine."""
_GIVE_UP_S = 120.0
"""Most refusals of one request."""
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Manner:
    """How a client behaves."""

    name: str = "to the end"
    leave_after_s: float | None = None
    """Close the connection so many seconds after the request, whatever has come."""
    leave_after_events: int | None = None
    """Close the connection after so many events."""
    pause_s: float = 0.0
    """Wait so many seconds before each read."""


TO_THE_END = Manner()


class Client:
    """Connections to one server."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        fresh = {"Cache-Control": "no-cache"}  # /state is not to be a second old
        self._http = httpx.AsyncClient(
            base_url=url, timeout=SILENT_S, limits=limits, verify=False, trust_env=False, headers=fresh
        )
        self.is_ending = False
        """Whether this program has told the server to end. It may refuse requests from then on."""

    async def close(self) -> None:
        await self._http.aclose()

    async def state(self) -> Json:
        """/state. Raises `httpx.HTTPError`."""
        found: Json = (await self._http.get("/state")).json()
        return found

    async def tokenize(self, text: str) -> None:
        response = await self._http.post("/tokenize", json={"prompt": text})
        response.raise_for_status()

    async def text(self, path: str) -> str:
        """A GET. Raises `httpx.HTTPError`."""
        return (await self._http.get(path)).text

    async def ask(self, asked: Marked, manner: Manner = TO_THE_END) -> History:
        """Send a request until it is served, left, or finally refused."""
        history = History(asked, manner.name, may_be_refused=self.is_ending)
        give_up_s = time.monotonic() + _GIVE_UP_S
        while True:
            attempt = await self._attempt(asked, manner)
            history.attempts.append(attempt)
            if attempt.end is not End.REFUSED or attempt.retry_after_s is None or self.is_ending:
                history.may_be_refused |= self.is_ending
                return history
            if time.monotonic() + attempt.retry_after_s > give_up_s:
                return history
            await asyncio.sleep(attempt.retry_after_s)

    async def _attempt(self, asked: Marked, manner: Manner) -> Attempt:
        attempt = Attempt(time.monotonic())
        try:
            async with asyncio.timeout(manner.leave_after_s or SILENT_S):
                await self._post(asked, manner, attempt)
        except TimeoutError:
            attempt.end = End.LEFT if manner.leave_after_s else End.SILENT
        except httpx.HTTPError as error:
            attempt.end, attempt.detail = End.BROKEN, repr(error)
        attempt.ended_s = time.monotonic()
        return attempt

    async def _post(self, asked: Marked, manner: Manner, attempt: Attempt) -> None:
        headers = {"x-request-id": asked.mark}
        async with self._http.stream("POST", asked.ask.path, json=asked.ask.body, headers=headers) as response:
            attempt.status = response.status_code
            attempt.request_id = response.headers.get("x-request-id", "")
            if response.status_code != 200:
                attempt.retry_after_s = _retry_after_s(response)
                attempt.detail = (await response.aread()).decode("utf-8", "replace")[:500]
                attempt.end = End.REFUSED
            elif asked.is_streamed:
                attempt.end = await _read(response, manner, attempt)
            else:
                body = json.loads(await response.aread())
                attempt.body = await self._background(body) if asked.ask.body.get("background") else body
                attempt.end = End.WHOLE

    async def _background(self, response: Json) -> Json:
        """The background response once it has ended. A client that leaves before cancels it."""
        path = f"/v1/responses/{response['id']}"
        try:
            while response["status"] in ("queued", "in_progress"):
                await asyncio.sleep(_POLL_S)
                response = (await self._http.get(path)).json()
        except asyncio.CancelledError:
            await self._http.post(path + "/cancel")
            raise
        return response


def _retry_after_s(response: httpx.Response) -> float | None:
    """Seconds to wait; the milliseconds header is preferred, as in official clients."""
    if "retry-after-ms" in response.headers:
        return float(response.headers["retry-after-ms"]) / 1e3
    return float(response.headers["retry-after"]) if "retry-after" in response.headers else None


async def _read(response: httpx.Response, manner: Manner, attempt: Attempt) -> End:
    """All events, or as many as the manner reads."""
    async for event in _events(response, manner.pause_s):
        attempt.events.append(event)
        if manner.leave_after_events is not None and len(attempt.events) >= manner.leave_after_events:
            return End.LEFT
    return End.WHOLE


async def _events(response: httpx.Response, pause_s: float) -> AsyncIterator[Event]:
    name = ""
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield Event(time.monotonic(), name, line.removeprefix("data: "))
            name = ""
            if pause_s:
                await asyncio.sleep(pause_s)
