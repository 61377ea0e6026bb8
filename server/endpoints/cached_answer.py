"""An answer that is the same for all callers, such as that of /metrics: made by one of them, in slices, and kept for a
second.

The routes with such an answer need no key, and it takes long to make. Without a bound, a few callers that ask in a loop
would take all of the event loop's time. This file knows no route and no format.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from starlette.requests import Request

AnswerT = TypeVar("AnswerT")

MAX_AGE_S = 1.0
"""Seconds from the beginning of one making to the next, if it is cheap."""

_SLICE_S = 0.002
"""Time after which the event loop gets its turn. The piece that is being made then may take longer."""

_CHEAP_S = 0.05
"""Seconds that making an answer may hold the event loop for each `MAX_AGE_S`. If it takes more, the answer is kept for
longer in proportion. So however large it is, it takes at most a twentieth of the loop's time."""


class CachedAnswer(Generic[AnswerT]):
    """Makes an answer at most once in `MAX_AGE_S`. Callers at the same time share one making (single flight).

    It belongs to the event loop. Callers may go away while it is made, which does not stop it.
    """

    def __init__(
        self, pieces: Callable[[], Generator[None, None, AnswerT]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`pieces`: makes an answer piece by piece, each in a few milliseconds at most."""
        self._pieces, self._clock = pieces, clock
        self._made: asyncio.Task[AnswerT] | None = None
        """The newest making, which may still run. Its result is the cached answer."""
        self._due_s = 0.0
        """When the next making may begin, if none runs."""

    async def get(self, *, is_fresh: bool = False) -> AnswerT:
        """The cached answer, or a new one if that is too old. If `is_fresh`, one whose making began after this call.
        Raises what making it raised, also to those that call before the next making is due."""
        made = self._made
        if is_fresh and made is not None and not made.done():
            await asyncio.wait([made])
        # Callers that waited for the same making share the next one.
        if made is self._made and (is_fresh or made is None or self._is_due(made)):
            self._made = asyncio.create_task(self._make())
        assert self._made is not None
        made = self._made
        if not made.done():
            await asyncio.wait([made])
        return made.result()

    def _is_due(self, made: asyncio.Task[AnswerT]) -> bool:
        return made.done() and (made.cancelled() or self._clock() >= self._due_s)

    async def _make(self) -> AnswerT:
        begun_s = slice_s = self._clock()
        held_s, pieces = 0.0, self._pieces()
        try:
            while True:
                try:
                    next(pieces)
                except StopIteration as end:
                    answer: AnswerT = end.value
                    return answer
                now_s = self._clock()
                if now_s - slice_s >= _SLICE_S:
                    held_s += now_s - slice_s
                    await asyncio.sleep(0)
                    slice_s = self._clock()
        finally:
            # Also if it fails: an answer that cannot be made takes no more of the loop's time.
            held_s += self._clock() - slice_s
            self._due_s = begun_s + MAX_AGE_S * max(1.0, held_s / _CHEAP_S)


def asks_for_fresh(request: Request) -> bool:
    """Whether the caller asks for an answer of this moment (`Cache-Control: no-cache`, RFC 9111), and may.

    A caller may if it has an admin key, or if the server has no keys: then it may ask for any work.
    """
    may = request.state.role == "admin" or not request.state.needs_key
    return may and "no-cache" in request.headers.get("cache-control", "").lower()
