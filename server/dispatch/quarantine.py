"""Which requests may have ended the engine, which one did, and that it does not come back.

Suspects are the requests of the steps that were under way when the engine died, as its flight record says. What kills
an engine is mostly not a request, so at first they go on together; those with whom a second engine dies before they are
past that place run alone there, one by one. Who is computed by a third engine that dies, alone, is failed, and whatever
asks for the same is refused for a while. Where the last was killed from outside, which is also how a system short of
memory ends it, fell silent or lost a frame, it takes two that die with it alone.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec
from msgspec import structs

from inferd.engine.api.errors import RequestError
from inferd.engine.api.wire.messages import Submit
from inferd.server.dispatch.journal import Journal

ALONE_AFTER = 2
"""Deaths in a row after which a suspect runs alone. Alone at once, 64 short answers took seconds more to go on."""
FAILED_AFTER = 3
"""Deaths in a row, the last of them alone, after which it is failed: so many restarts does a poison cost at most where
the engine ends itself."""
FAILED_AFTER_ALONE = 2
"""Deaths alone, where the last may be by chance. At 1, of 68 kills at random steps under a hundred answers three fell
so that an innocent was failed."""
REFUSED_S = 600.0
_MAX_REFUSED = 1024
"""Digests kept; the oldest goes first."""


class Quarantine:
    """Of one server, over all its engines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: dict[bytes, float] = {}
        """Digest -> until when."""

    def check(self, submit: Submit) -> None:
        """Raises `RequestError` for a request that ended engines lately."""
        if not self._refused:
            return
        until_s = self._refused.get(_digest(submit), 0.0)
        left_s = until_s - self._clock()
        if left_s > 0:
            message = f"This request has repeatedly ended the engine and is not tried again for {left_s:.0f} s."
            raise RequestError("engine_error", message)

    def judge(
        self, in_flight: Mapping[int, int], journals: Iterable[Journal], *, is_external_kill: bool = False
    ) -> list[Journal]:
        """After a death: marks the suspects, and returns those that are to be failed.

        `in_flight`: what the dead engine's flight record says. `is_external_kill`: no request need have to do with it.
        """
        guilty: list[Journal] = []
        for journal in journals:
            if not journal.is_suspect:
                journal.num_deaths = journal.num_deaths_alone = journal.reached = 0
            end = in_flight.get(journal.tag)
            if end is None:
                continue
            journal.num_deaths += 1
            journal.num_deaths_alone += len(in_flight) == 1
            least_alone = FAILED_AFTER_ALONE if is_external_kill else 1
            if journal.num_deaths >= FAILED_AFTER and len(in_flight) == 1 and journal.num_deaths_alone >= least_alone:
                guilty.append(journal)
                self._refuse(journal.submit)
            else:
                journal.reached = max(end, journal.reached)
        return guilty

    @staticmethod
    def replay(journal: Journal) -> Submit:
        """What the next engine is told of a request."""
        return journal.replay(alone=journal.num_deaths >= ALONE_AFTER)

    def _refuse(self, submit: Submit) -> None:
        now = self._clock()
        self._refused = {digest: until_s for digest, until_s in self._refused.items() if until_s > now}
        if len(self._refused) >= _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._refused[_digest(submit)] = now + REFUSED_S


def _digest(submit: Submit) -> bytes:
    """The same for the same prompt and parameters, whoever asks; a seed is drawn anew each time."""
    asked = submit.prompt_ids, structs.replace(submit.params, seed=0)
    return hashlib.blake2b(msgspec.msgpack.encode(asked), digest_size=16).digest()
