"""Finds the request that kills engines, fails it, and refuses it for a while.

Suspects are the requests in the steps that ran when the engine died; its flight recorder names them. Most deaths have
another cause, so all suspects continue together at first. If a second engine dies before a suspect is past that
position, the suspect runs alone there. If a third engine dies with it alone, it is failed, and equal requests are
refused. A death with another likely cause is weaker evidence: the engine was killed from outside (as the kernel does
when memory runs out), fell silent, or lost a frame. Then two engines must die with the request alone.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec
from msgspec import structs

from inferd.engine.api.errors import RequestError
from inferd.engine.api.wire.messages import Submit
from inferd.server.dispatch.token_stream import TokenStream

ALONE_AFTER = 2
"""Deaths in a row after which a suspect runs alone. After one death already, 64 short answers resumed seconds later."""
FAILED_AFTER = 3
"""Deaths in a row, the last with the request alone, after which it is failed. A request that makes the engine end
itself costs at most so many restarts."""
FAILED_AFTER_ALONE = 2
"""Deaths with the request alone, if the last may be chance. At 1, three of 68 kills at random steps under a hundred
answers failed an innocent request."""
REFUSED_S = 600.0
_MAX_REFUSED = 1024
"""Digests kept; the oldest goes first."""


class Quarantine:
    """The quarantine of one server, over all its engines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: dict[bytes, float] = {}
        """Digest -> time until which it is refused."""

    def check(self, submit: Submit) -> None:
        """Raises `RequestError` for a request that recently killed engines."""
        if not self._refused:
            return
        until_s = self._refused.get(_digest(submit), 0.0)
        left_s = until_s - self._clock()
        if left_s > 0:
            message = f"This request has repeatedly ended the engine and is not tried again for {left_s:.0f} s."
            raise RequestError("engine_error", message)

    def judge(
        self, in_flight: Mapping[int, int], streams: Iterable[TokenStream], *, is_external_kill: bool = False
    ) -> list[TokenStream]:
        """After a death: marks the suspects, and returns the requests to fail.

        `in_flight`: the dead engine's flight record, tag -> position that its step reaches. `is_external_kill`: the
        death need not have to do with any request.
        """
        culprits: list[TokenStream] = []
        for stream in streams:
            if not stream.is_suspect:
                stream.num_deaths = stream.num_deaths_alone = stream.reached = 0
            end = in_flight.get(stream.tag)
            if end is None:
                continue
            stream.num_deaths += 1
            stream.num_deaths_alone += len(in_flight) == 1
            least_alone = FAILED_AFTER_ALONE if is_external_kill else 1
            if stream.num_deaths >= FAILED_AFTER and len(in_flight) == 1 and stream.num_deaths_alone >= least_alone:
                culprits.append(stream)
                self._refuse(stream.submit)
            else:
                stream.reached = max(end, stream.reached)
        return culprits

    @staticmethod
    def replay(stream: TokenStream) -> Submit:
        """The submit of a request for the next engine."""
        return stream.replay(alone=stream.num_deaths >= ALONE_AFTER)

    def _refuse(self, submit: Submit) -> None:
        now = self._clock()
        self._refused = {digest: until_s for digest, until_s in self._refused.items() if until_s > now}
        if len(self._refused) >= _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._refused[_digest(submit)] = now + REFUSED_S


def _digest(submit: Submit) -> bytes:
    """The same for equal prompts and parameters of any caller; without the seed, which is drawn for each request."""
    repeated = submit.prompt_ids, structs.replace(submit.params, seed=0)
    return hashlib.blake2b(msgspec.msgpack.encode(repeated), digest_size=16).digest()
