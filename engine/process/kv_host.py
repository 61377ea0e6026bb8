"""The tier in host memory: copies what a GPU's pool holds behind the steps, and back, in front of another tier if there
is one.

A thread copies pieces into host memory, and another one copies them back. What is not there is sought in the tier
below, and what that loads goes to the pool alone. Pieces are looked up at once, without a thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass

from inferd.engine.api.kv_store.segment import Damaged, Missing, NotWritten
from inferd.engine.cache.below import PIECE_BLOCKS, Comparison, Found, Load, Piece, Seek, TierUse
from inferd.engine.process.host_store import HostStore
from inferd.engine.process.kv_tier import DirectoryTier, QueuedLoad
from inferd.engine.process.place_memory import PlaceMemory, Row, rows_of

logger = logging.getLogger(__name__)

_FIRST_BYTES_PER_S = 5e9
"""Expected bandwidth of loads before one was measured: less than half of what PCIe 4.0 with 16 lanes can do."""
_NEWEST = 0.3
"""Weight of the newest measurement in the bandwidth of loads."""
_MOST_QUEUED = 1024
"""Pieces that wait to be copied. Further ones are dropped, and counted."""
_TELL_AFTER_S = 60.0
"""Least seconds between two warnings."""


class _Sought:
    """Pieces of host memory, and those that the tier below still looks for."""

    def __init__(self, own: Sequence[Found | None], below: Seek | None) -> None:
        self._own, self._below = own, below

    @property
    def is_done(self) -> bool:
        return self._below is None or self._below.is_done

    def take(self) -> Sequence[Found]:
        """In the order of the chain, up to the first piece that neither has, or the first short one."""
        below = iter(self._below.take() if self._below is not None else ())
        found: list[Found] = []
        for own in self._own:
            each = next(below, None) if own is None else own  # below found what is missing here, in order
            if each is None:
                break
            found.append(each)
            if each.piece.num_blocks < PIECE_BLOCKS:
                break
        return found


class _Loads:
    """Loads of several tiers, whose pieces follow one another."""

    def __init__(self, parts: list[tuple[Load, int]]) -> None:
        """`parts`: each with its number of pieces."""
        self._parts = parts

    @property
    def has_ended(self) -> bool:
        return bool(self._parts) and self._parts[0][0].has_ended

    def take_ended(self) -> Sequence[bool]:
        ended = list[bool]()
        while self._parts:
            load, num_left = self._parts[0]
            of_load = load.take_ended()
            ended += of_load
            if len(of_load) < num_left:
                self._parts[0] = load, num_left - len(of_load)
                break
            del self._parts[0]
        return ended

    def stop(self) -> None:
        for load, _ in self._parts:
            load.stop()


@dataclass(frozen=True, slots=True)
class _Offered:
    """A piece to copy."""

    salt: str
    piece: Piece
    places: tuple[int, ...]
    num_erased: int
    num_forgotten: int
    """As the tier's when it was offered."""


class _Comparison:
    """A piece that this tier and the one below compare."""

    def __init__(
        self, own: Future[bool | None], below: Comparison | None, distrust: Callable[[bool | None], None]
    ) -> None:
        """`distrust` is called with the own result if any is that they differ."""
        self._own, self._below, self._distrust = own, below, distrust

    @property
    def is_done(self) -> bool:
        return self._own.done() and (self._below is None or self._below.is_done)

    def take(self) -> bool | None:
        own, below = self._own.result(), None if self._below is None else self._below.take()
        if own is False or below is False:
            self._distrust(own)
            return False
        return own or below


class HostTier:
    """The tier of one engine."""

    def __init__(
        self,
        store: HostStore,
        memory: PlaceMemory,
        num_erased: Callable[[Iterable[int]], int],
        num_groups: int,
        below: DirectoryTier | None = None,
    ) -> None:
        """`num_erased`: times that any of these places got ready for other content. `below`: keeps more."""
        self._store, self._memory, self._num_erased = store, memory, num_erased
        self._num_groups, self._below = num_groups, below
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="inferd-kv-host")
        self._queue: queue.Queue[_Offered] = queue.Queue(_MOST_QUEUED)
        self._bytes_per_s = _FIRST_BYTES_PER_S
        self._num_asked_bytes = self._num_ended_bytes = 0
        """Bytes of all loads. The engine's loop counts the first, the reading thread the second."""
        self._num_forgotten = 0
        """Times that pieces were dropped that may not be kept again. What was offered before is not kept."""
        self._use = TierUse()
        self._told_s = float("-inf")
        threading.Thread(target=self._copy_all, name="inferd-kv-copy", daemon=True).start()

    @property
    def use(self) -> TierUse:
        """Sums of this tier and the one below."""
        below = TierUse() if self._below is None else self._below.use
        self._use.num_host_bytes = self._store.num_bytes
        return TierUse(*map(sum, zip(astuple(self._use), astuple(below), strict=True)))

    @property
    def news(self) -> deque[tuple[Piece | None, bool]] | None:
        """Those of the tier below. Host memory ends with this engine, so it makes none."""
        return None if self._below is None else self._below.news

    @news.setter
    def news(self, wanted: deque[tuple[Piece | None, bool]] | None) -> None:
        if self._below is not None:
            self._below.news = wanted

    # -- reading -----------------------------------------------------------------------------------------------------

    def seek(self, salt: str, wanted: Sequence[Sequence[Piece]]) -> _Sought:
        own = [self._first(salt, pieces) for pieces in wanted]
        missing = [pieces for pieces, found in zip(wanted, own, strict=True) if found is None]
        below = self._below.seek(salt, missing) if self._below is not None and missing else None
        return _Sought(own, below)

    def _first(self, salt: str, pieces: Sequence[Piece]) -> Found | None:
        for piece in pieces:
            sizes = self._store.sizes(salt, piece)
            if sizes is not None:
                return Found(piece, sizes)
        return None

    def load(self, salt: str, found: Sequence[Found], places: Sequence[Sequence[int]]) -> _Loads:
        parts = list[tuple[Load, int]]()
        for each, of_rows in zip(found, places, strict=True):
            if self._below is not None and self._store.sizes(salt, each.piece) != each.sizes:
                parts.append((self._below.load(salt, [each], [of_rows]), 1))
                continue
            load, num_bytes = QueuedLoad(), sum(each.sizes)
            self._num_asked_bytes += num_bytes
            self._reading.submit(self._load, load, salt, each.piece, rows_of(of_rows, self._num_groups), num_bytes)
            parts.append((load, 1))
        return _Loads(parts)

    def _load(self, load: QueuedLoad, salt: str, piece: Piece, rows: Sequence[Row], num_bytes: int) -> None:
        is_whole, began_s = False, time.monotonic()
        try:
            if not load.is_stopped:
                with self._store.reading(salt, piece) as buffers:
                    self._memory.store(rows, buffers)
                is_whole = True
        except Damaged as error:
            self._use.num_damaged += 1
            self._tell(error)
        except Missing:
            pass  # it was evicted
        except Exception:
            logger.exception("a KV piece could not be copied from host memory")
        finally:
            if is_whole:
                own = num_bytes / max(time.monotonic() - began_s, 1e-6)
                self._bytes_per_s += _NEWEST * (own - self._bytes_per_s)
                self._use.num_read_bytes += num_bytes
                self._use.num_host_read_bytes += num_bytes
            self._num_ended_bytes += num_bytes
            load.ended.append(is_whole)

    def seconds_to_load(self, salt: str, found: Sequence[Found]) -> float:
        num_bytes, others = self._num_asked_bytes - self._num_ended_bytes, list[Found]()
        for each in found:
            if self._store.sizes(salt, each.piece) is None:
                others.append(each)
            else:
                num_bytes += sum(each.sizes)
        below_s = self._below.seconds_to_load(salt, others) if self._below is not None and others else 0.0
        return num_bytes / self._bytes_per_s + below_s

    # -- comparing ---------------------------------------------------------------------------------------------------

    def compare(self, salt: str, piece: Piece, places: Sequence[int]) -> _Comparison:
        own = self._reading.submit(self._compare, salt, piece, rows_of(places, self._num_groups))
        below = None if self._below is None else self._below.compare(salt, piece, places)
        return _Comparison(own, below, self._distrust)

    def _compare(self, salt: str, piece: Piece, rows: Sequence[Row]) -> bool | None:
        try:
            with self._store.reading(salt, piece) as kept:
                given = self._memory.buffers(rows)
                self._memory.fetch(rows, given)
                return all(
                    b"".join(own) == b"".join(others) for own, others in zip(kept, given, strict=True) if own and others
                )
        except Damaged as error:
            self._use.num_damaged += 1
            self._tell(error)
        except Missing:
            pass
        except Exception:
            logger.exception("a KV piece could not be compared")
        return None

    def distrust(self) -> None:
        self._drop_all()
        if self._below is not None:
            self._below.distrust()

    def _drop_all(self) -> int:
        """Drop all pieces that may be wrong, and return their number."""
        self._num_forgotten += 1
        num_dropped = self._store.clear()
        self._use.num_distrusted += num_dropped
        return num_dropped

    def _distrust(self, own: bool | None) -> None:
        """Drop all pieces: this engine wrote them, or they may follow from what it loaded."""
        num_dropped = self._drop_all()
        if own is False:
            if self._below is not None:
                self._below.distrust()
            logger.error(
                "KV host memory: a piece is not what its tokens give when they are computed again. All %d pieces are "
                "removed. Suspect this machine, or a fault in inferd",
                num_dropped,
            )

    # -- writing -----------------------------------------------------------------------------------------------------

    def offer(self, salt: str, piece: Piece, places: Sequence[int]) -> None:
        if self._below is not None:
            self._below.offer(salt, piece, places)
        if self._store.renew(salt, piece):
            return
        try:
            offered = _Offered(salt, piece, tuple(places), self._num_erased(places), self._num_forgotten)
            self._queue.put_nowait(offered)
        except queue.Full:
            self._use.num_unwritten += 1

    def forget(self, salt: str, keys: Sequence[bytes]) -> None:
        # The copying thread has kept a piece by now, and the next line drops it. Or else it sees this number first.
        self._num_forgotten += 1
        self._store.drop(salt, keys)
        if self._below is not None:
            self._below.forget(salt, keys)

    def clear(self) -> None:
        self._num_forgotten += 1
        self._store.clear()
        if self._below is not None:
            self._below.clear()

    def wait_written(self) -> None:
        """Wait for the tier below, for some seconds at most: what is in host memory ends with this engine."""
        if self._below is not None:
            self._below.wait_written()

    @property
    def num_waiting(self) -> int:
        """Pieces that are or will be copied."""
        return self._queue.unfinished_tasks

    def _copy_all(self) -> None:
        while True:
            offered = self._queue.get()
            try:
                self._copy(offered)
            except NotWritten as error:
                self._use.num_unwritten += 1
                self._tell(error)
            except Exception:
                logger.exception("a KV piece could not be copied to host memory")
            finally:
                self._queue.task_done()

    def _copy(self, offered: _Offered) -> None:
        store, memory = self._store, self._memory
        if self._is_erased(offered) or store.renew(offered.salt, offered.piece):
            return
        is_copied = False
        rows = rows_of(offered.places, self._num_groups)
        sizes = [0 if row is None else memory.row_bytes(*row) for row in rows]
        kept = store.reserve(offered.salt, offered.piece, sizes)
        try:
            is_copied = memory.fetch(rows, kept.buffers) and not self._is_erased(offered)
        finally:
            if not is_copied:
                store.give_back(kept)
        if is_copied:
            store.keep(kept)
            self._use.num_written_bytes += sum(sizes)
            if self._num_forgotten != offered.num_forgotten:
                store.take_back(kept)

    def _is_erased(self, offered: _Offered) -> bool:
        """Whether its places hold something else by now, or may soon, or cannot be trusted."""
        return (self._num_erased(offered.places), self._num_forgotten) != (offered.num_erased, offered.num_forgotten)

    def _tell(self, error: Exception) -> None:
        """Warn, but not again soon."""
        now = time.monotonic()
        if now - self._told_s >= _TELL_AFTER_S:
            self._told_s = now
            logger.warning("KV host memory: %s", error)
