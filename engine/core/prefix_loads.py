"""Requests whose prefix lies below the pool, while it is found and loaded. The scheduler does not know them yet.

A request first waits for the search, which takes a moment. If loading is cheaper than computing, it then waits until
its pieces are in the pool. Others run meanwhile. A request that wants what is loaded already waits for that, and looks
again. Whatever fails or is too slow, the request is queued and computes what it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from inferd.engine.cache.below import Found, Load, Piece, PrefixLoad, Seek, Tier
from inferd.engine.cache.table import KVCache
from inferd.engine.request import Request

_LONGEST_SEEK_S = 2.0
"""Longest wait for a search. One takes some milliseconds, but the file system of a dead server answers nothing."""
_OF_TARGET = 0.25
"""Part of a request's TTFT target that a search may take."""
_TRIES_EVERY = 16
"""So often a prefix is loaded that seems faster to compute: otherwise a tier that was slow once would stay so."""
_LEAST_LOAD_S = 2.0
"""Least time for a load, which may also take as long as it would take to compute the tokens."""


@dataclass(slots=True)
class TierCounts:
    """Sums since the engine began."""

    num_loaded_tokens: int = 0
    """Tokens of prefixes that came from below."""
    num_slow: int = 0
    """Prefixes that were computed, because that was expected to be faster."""
    num_failed: int = 0
    """Pieces that could not be loaded whole."""
    wait_s: float = 0.0
    """Seconds that requests waited here."""
    compute_s: float = 0.0
    """Expected seconds to compute what was loaded for them."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """One request, or a load whose request has ended."""

    prefix: PrefixLoad
    salt: str
    seek: Seek
    began_s: float
    until_s: float
    """When it stops waiting and computes."""
    load: Load | None = None
    is_behind: bool = False
    """Whether it waits for what another request has loaded."""
    is_aborted: bool = False
    """Whether its request is gone, or computes its prefix."""
    is_distrusted: bool = False
    """Whether its load may have read what is wrong."""
    is_overdue: bool = False
    """Whether it took too long."""


class PrefixLoads:
    """All of one engine."""

    def __init__(
        self, cache: KVCache, tier: Tier, seconds_to_compute: Callable[[int], float], clock: Callable[[], float]
    ) -> None:
        """`seconds_to_compute`: expected for so many tokens of prompts. `clock`: seconds."""
        self._cache, self.tier, self._seconds_to_compute, self._clock = cache, tier, seconds_to_compute, clock
        self._waiting: dict[Request, _Waiting] = {}
        self._stuck: list[Seek] = []
        """Searches that took too long and have not ended. Until they have, nobody else waits for the tier."""
        self._num_slow = 0
        """Prefixes in a row that were computed because that seemed faster."""
        self.counts = TierCounts()
        self.on_loaded: Callable[[Request, Sequence[Piece]], None] | None = None
        """Called with a request and the pieces of its prefix that were loaded, if there are any."""

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
        now = self._clock() if self._waiting else 0.0
        return any(
            (not waiting.is_aborted and waiting.until_s < now)
            or (
                waiting.load.has_ended
                if waiting.load is not None
                else waiting.is_aborted or (waiting.seek.is_done and not waiting.is_behind)
            )
            for waiting in self._waiting.values()
        )

    def open(self, request: Request) -> bool:
        """Look for the request's prefix. False if it need not wait."""
        self._stuck = [seek for seek in self._stuck if not seek.is_done]
        if self._stuck or any(waiting.is_overdue for waiting in self._waiting.values()):
            return False
        prefix = PrefixLoad(self._cache, request)
        wanted = prefix.wanted()
        if not wanted:
            return False
        target_s = request.scheduling.ttft_target_s
        longest_s = _LONGEST_SEEK_S if target_s is None else min(_LONGEST_SEEK_S, target_s * _OF_TARGET)
        seek = self.tier.seek(request.salt, wanted)
        now = self._clock()
        self._waiting[request] = _Waiting(prefix, request.salt, seek, now, now + longest_s)
        return True

    def abort(self, request: Request) -> bool:
        """Forget a request. False if it does not wait here. Its places are free once its load has ended."""
        waiting = self._waiting.get(request)
        if waiting is None or waiting.is_aborted:
            return False
        self._leave(waiting)
        return True

    def distrust(self) -> None:
        """Use nothing of what is being loaded."""
        for waiting in self._waiting.values():
            if waiting.load is not None:
                waiting.load.stop()
                waiting.is_distrusted = True

    def _leave(self, waiting: _Waiting) -> None:
        waiting.is_aborted = True
        if waiting.load is not None:
            waiting.load.stop()

    def ended(self) -> Iterator[Request]:
        """The requests that may be queued now."""
        yield from self._ended([each for each in self._waiting.items() if not each[1].is_behind])
        # The others may have ended now.
        yield from self._ended([each for each in self._waiting.items() if each[1].is_behind])

    def _ended(self, waiting_requests: list[tuple[Request, _Waiting]]) -> Iterator[Request]:
        now = self._clock()
        for request, waiting in waiting_requests:
            was_aborted = waiting.is_aborted
            if not was_aborted and waiting.until_s < now:
                waiting.is_overdue = True
                if waiting.load is None and not waiting.seek.is_done:
                    self._stuck.append(waiting.seek)
                self._leave(waiting)
                self.counts.num_slow += 1
            if not self._goes_on(request, waiting):
                del self._waiting[request]
            elif not (waiting.is_aborted and not was_aborted):
                continue
            if not was_aborted:
                self.counts.wait_s += now - waiting.began_s
                yield request

    def _goes_on(self, request: Request, waiting: _Waiting) -> bool:
        """Whether a request still waits, or its load has not ended."""
        if waiting.load is not None:
            self._settle(waiting, waiting.load)
            if not waiting.prefix.is_settled:
                return True
            waiting.prefix.close()
            if waiting.prefix.loaded and self.on_loaded is not None:
                self.on_loaded(request, waiting.prefix.loaded)
            return False
        if waiting.is_aborted:
            return False
        if not waiting.seek.is_done:
            return True
        found = list(waiting.seek.take())
        waiting.prefix.tell(found)
        if waiting.is_behind:
            if self._is_loading(found):
                return True
            # The pool has now the pieces that others loaded.
            waiting.prefix, waiting.is_behind = PrefixLoad(self._cache, request), False
            wanted = waiting.prefix.wanted()
            if wanted:
                waiting.seek = self.tier.seek(request.salt, wanted)
            return bool(wanted)
        if self._is_loading(found):
            waiting.is_behind = True
            waiting.until_s = max(other.until_s for other in self._waiting.values())
            return True
        return self._begin_load(waiting, found)

    def _is_loading(self, found: Sequence[Found]) -> bool:
        """Whether others load some of these pieces."""
        keys = {each.piece.key for each in found}
        return any(keys & waiting.prefix.keys for waiting in self._waiting.values())

    def _begin_load(self, waiting: _Waiting, found: Sequence[Found]) -> bool:
        """Load what was found, if that is worth it."""
        found = waiting.prefix.usable(found)
        num_tokens = waiting.prefix.num_tokens(found)
        if not num_tokens:
            return False
        load_s = self.tier.seconds_to_load(waiting.salt, found)
        is_slow = load_s > self._seconds_to_compute(num_tokens)
        self._num_slow = self._num_slow + 1 if is_slow else 0
        if self._num_slow % _TRIES_EVERY:
            self.counts.num_slow += 1
            return False
        found, places = waiting.prefix.reserve(found)
        if not found:
            waiting.prefix.close()
            return False
        waiting.load = self.tier.load(waiting.salt, found, places)
        waiting.until_s = self._clock() + max(_LEAST_LOAD_S, self._seconds_to_compute(num_tokens))
        return True

    def _settle(self, waiting: _Waiting, load: Load) -> None:
        for is_loaded in load.take_ended():
            num_tokens = waiting.prefix.settle(is_loaded and not waiting.is_distrusted)
            self.counts.num_loaded_tokens += num_tokens
            self.counts.compute_s += 0.0 if waiting.is_aborted else self._seconds_to_compute(num_tokens)
            self.counts.num_failed += not is_loaded and not waiting.is_aborted
            if not num_tokens:
                load.stop()  # nothing can be hit behind a gap
