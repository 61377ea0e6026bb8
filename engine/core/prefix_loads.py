"""Requests whose prefix lies below the pool, while it is found and loaded. The scheduler does not know them yet.

A request first waits for the search, which takes a moment. If loading is cheaper than computing, it then waits until
its pieces are in the pool. Others run meanwhile. A request that wants what is loaded already waits for that, and looks
again. Whatever fails or is too slow, the request is queued and computes what it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from inferd.engine.cache.below import Found, Load, PrefixLoad, Seek, Tier
from inferd.engine.cache.table import KVCache
from inferd.engine.request import Request


@dataclass(slots=True)
class TierCounts:
    """Sums since the engine began."""

    num_loaded_tokens: int = 0
    """Tokens of prefixes that came from below."""
    num_slow: int = 0
    """Prefixes that were computed, because that was expected to be faster."""
    num_failed: int = 0
    """Pieces that could not be loaded whole."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """One request, or a load whose request has ended."""

    prefix: PrefixLoad
    salt: str
    seek: Seek
    load: Load | None = None
    is_behind: bool = False
    """Whether it waits for what another request has loaded."""
    is_aborted: bool = False


class PrefixLoads:
    """All of one engine."""

    def __init__(self, cache: KVCache, tier: Tier, seconds_to_compute: Callable[[int], float]) -> None:
        """`seconds_to_compute`: expected for so many tokens of prompts."""
        self._cache, self._tier, self._seconds_to_compute = cache, tier, seconds_to_compute
        self._waiting: dict[Request, _Waiting] = {}
        self.counts = TierCounts()

    def __len__(self) -> int:
        """Requests that wait."""
        return sum(not waiting.is_aborted for waiting in self._waiting.values())

    @property
    def is_busy(self) -> bool:
        """Whether something is searched or loaded."""
        return bool(self._waiting)

    @property
    def has_news(self) -> bool:
        """Whether `ended` has anything to do."""
        return any(
            waiting.load.has_ended if waiting.load is not None else waiting.is_aborted or waiting.seek.is_done
            for waiting in self._waiting.values()
            if not waiting.is_behind or waiting.is_aborted
        )

    def open(self, request: Request) -> bool:
        """Look for the request's prefix. False if it need not wait."""
        prefix = PrefixLoad(self._cache, request)
        wanted = prefix.wanted()
        if not wanted:
            return False
        self._waiting[request] = _Waiting(prefix, request.salt, self._tier.seek(request.salt, wanted))
        return True

    def abort(self, request: Request) -> bool:
        """Forget a request. False if it does not wait here. Its places are free once its load has ended."""
        waiting = self._waiting.get(request)
        if waiting is None:
            return False
        waiting.is_aborted = True
        if waiting.load is not None:
            waiting.load.stop()
        return True

    def ended(self) -> Iterator[Request]:
        """The requests that may be queued now."""
        # Those behind others last: the others may end now.
        for request, waiting in sorted(self._waiting.items(), key=lambda item: item[1].is_behind):
            if self._goes_on(request, waiting):
                continue
            del self._waiting[request]
            if not waiting.is_aborted:
                yield request

    def _goes_on(self, request: Request, waiting: _Waiting) -> bool:
        """Whether a request still waits, or its load has not ended."""
        if waiting.load is not None:
            self._settle(waiting, waiting.load)
            if waiting.prefix.is_settled:
                waiting.prefix.close()
                return False
            return True
        if waiting.is_aborted:
            return False
        if not waiting.seek.is_done:
            return True
        found = list(waiting.seek.take())
        if waiting.is_behind:
            if self._is_loading(found):
                return True
            # What others loaded is in the pool now.
            waiting.prefix, waiting.is_behind = PrefixLoad(self._cache, request), False
            wanted = waiting.prefix.wanted()
            waiting.seek = self._tier.seek(request.salt, wanted)
            return bool(wanted)
        if self._is_loading(found):
            waiting.is_behind = True
            return True
        return self._begin_load(waiting, found)

    def _is_loading(self, found: Sequence[Found]) -> bool:
        """Whether others load some of these pieces."""
        keys = {each.piece.key for each in found}
        return any(keys & waiting.prefix.keys for waiting in self._waiting.values())

    def _begin_load(self, waiting: _Waiting, found: Sequence[Found]) -> bool:
        """Load what was found, if that is worth it."""
        num_tokens = waiting.prefix.num_tokens(found)
        if not num_tokens:
            return False
        load_s = self._tier.seconds_to_load(sum(sum(each.sizes) for each in found))
        if load_s > self._seconds_to_compute(num_tokens):
            self.counts.num_slow += 1
            return False
        found, places = waiting.prefix.reserve(found)
        if not found:
            return False
        waiting.load = self._tier.load(waiting.salt, found, places)
        return True

    def _settle(self, waiting: _Waiting, load: Load) -> None:
        for is_loaded in load.take_ended():
            self.counts.num_loaded_tokens += waiting.prefix.settle(is_loaded)
            self.counts.num_failed += not is_loaded and not waiting.is_aborted
