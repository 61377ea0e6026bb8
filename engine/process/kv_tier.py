"""The tier in a directory: reads and writes pieces on threads beside the engine's loop.

A piece is written from the pool's memory behind the steps. If one of its places gets other content meanwhile, nothing
is kept of it. Searches run in the order in which they came, and so do loads, on threads of their own. The directory is
opened by the first of them: a file system that does not answer holds up neither the start nor a step.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from inferd.engine.api.errors import StartError
from inferd.engine.api.kv_store.directory import KVDirectory
from inferd.engine.api.kv_store.segment import Damaged, Missing, NotWritten, SegmentId, Stopped
from inferd.engine.cache.below import PIECE_BLOCKS, Found, Piece, TierUse
from inferd.engine.process.place_memory import PlaceMemory, Row, rows_of

logger = logging.getLogger(__name__)

_WRITE_BYTES_PER_S = 256 * 2**20
"""Bound of the bandwidth of writes. Prompts of a model of 1.5 billion parameters make 5 to 20 MB/s on two cores."""
_FIRST_READ_BYTES_PER_S = 500e6
"""Expected bandwidth of loads before one was measured."""
_MOST_QUEUED = 1024
"""Pieces that wait to be written. Behind a slow disk further ones are dropped, and counted."""
_MOST_KNOWN = 65536
"""Pieces that this process knows to be written."""
_KNOWN_S = 60.0
"""Seconds after which a piece that is still used is offered again, so that it counts as used in the directory too."""
_TELL_AFTER_S = 60.0
"""Least seconds between two warnings of the same kind, and between two tries to open the directory."""
_LAST_WRITES_S = 3.0
"""Seconds in which pieces are still written when the engine is to end. The server kills it after 5 s."""
_LOOK_S = 0.002
_NEWEST = 0.3
"""Weight of the newest measurement in the bandwidth of loads."""


class _Search:
    def __init__(self, future: Future[list[Found]]) -> None:
        self._future = future

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def take(self) -> Sequence[Found]:
        return self._future.result()


class QueuedLoad:
    """Pieces that a reading thread loads."""

    def __init__(self) -> None:
        self.ended: deque[bool] = deque()
        self.is_stopped = False

    @property
    def has_ended(self) -> bool:
        return bool(self.ended)

    def take_ended(self) -> Sequence[bool]:
        return [self.ended.popleft() for _ in range(len(self.ended))]

    def stop(self) -> None:
        self.is_stopped = True


class _Comparison:
    def __init__(self, future: Future[bool | None]) -> None:
        self._future = future

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def take(self) -> bool | None:
        return self._future.result()


@dataclass(frozen=True, slots=True)
class _Offered:
    """A piece to write."""

    piece: Piece
    segment: SegmentId
    places: tuple[int, ...]
    num_erased: int
    num_distrusts: int
    """As the tier's when it was offered."""


@dataclass(frozen=True, slots=True)
class _Forgotten:
    """Segments to remove. None: all of this model."""

    segments: tuple[SegmentId, ...] | None


class DirectoryTier:
    """The tier of one engine."""

    def __init__(
        self,
        opened: Callable[[], KVDirectory],
        memory: PlaceMemory,
        num_erased: Callable[[Iterable[int]], int],
        num_groups: int,
        fingerprint: bytes,
    ) -> None:
        """`opened` opens the directory, or raises `StartError`. `num_erased`: times that any of these places got ready
        for other content. `fingerprint`: 32 bytes, a hash of all that the bytes of a block depend on, without its
        tokens and salt."""
        self._open, self._tried_s = opened, float("-inf")
        self._directory: KVDirectory | None = None
        self._opening = threading.Lock()
        self._memory, self._num_erased = memory, num_erased
        self._num_groups, self._fingerprint = num_groups, fingerprint
        self._writer = os.urandom(16)
        self._searching = ThreadPoolExecutor(1, thread_name_prefix="inferd-kv-search")
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="inferd-kv-read")
        self._queue: queue.Queue[_Offered | _Forgotten] = queue.Queue(_MOST_QUEUED)
        self._known: OrderedDict[Piece, float] = OrderedDict()
        """Pieces that wait to be written, or were, and when they were offered. Only the engine's loop uses it."""
        self._unknown: deque[Piece] = deque()
        """Pieces that were not written after all."""
        self._num_distrusts = self._num_known_distrusts = 0
        """Times that a piece was found wrong. Pieces that were offered before are not written."""
        self._bytes_per_s = _FIRST_READ_BYTES_PER_S
        self._num_asked_bytes = self._num_ended_bytes = 0
        """Bytes of all loads. The engine's loop counts the first, the reading thread the second."""
        self._told_s: dict[type, float] = {}
        self.use = TierUse()
        self.news: deque[tuple[Piece | None, bool]] | None = None
        threading.Thread(target=self._write_all, name="inferd-kv-write", daemon=True).start()

    def _opened(self) -> KVDirectory:
        """The directory. Raises `Missing` if it cannot be opened, and tries again some time later."""
        with self._opening:
            if self._directory is None:
                if time.monotonic() - self._tried_s < _TELL_AFTER_S:
                    raise Missing("the directory could not be opened")
                try:
                    self._directory = self._open()
                    self.use.num_held_bytes = self._directory.used_bytes
                except (StartError, OSError) as error:
                    self._tried_s = time.monotonic()
                    self._tell(error)
                    raise Missing("the directory could not be opened") from error
            return self._directory

    def _id_of(self, salt: str, piece: Piece) -> SegmentId:
        salted = salt.encode("utf-8", "surrogatepass")
        tenant = hashlib.blake2b(salted, digest_size=16, person=b"inferd tenant").digest()
        key = hashlib.blake2b(piece.key, digest_size=32, person=b"state").digest() if piece.has_state else piece.key
        return SegmentId(self._fingerprint, tenant, key)

    # -- reading -----------------------------------------------------------------------------------------------------

    def seek(self, salt: str, wanted: Sequence[Sequence[Piece]]) -> _Search:
        return _Search(self._searching.submit(self._seek, salt, wanted))

    def _seek(self, salt: str, wanted: Sequence[Sequence[Piece]]) -> list[Found]:
        found: list[Found] = []
        for pieces in wanted:
            each = self._first(salt, pieces)
            if each is None:
                break
            found.append(each)
            if each.piece.num_blocks < PIECE_BLOCKS:
                break
        return found

    def _first(self, salt: str, pieces: Sequence[Piece]) -> Found | None:
        """The first of these pieces that is there."""
        for piece in pieces:
            try:
                return Found(piece, self._opened().sizes(self._id_of(salt, piece)))
            except Missing:
                self._say(piece, is_there=False)
            except Damaged as error:
                self._count_damaged(error)
                self._say(piece, is_there=False)
            except Exception:
                logger.exception("the KV directory could not be searched")
        return None

    def load(self, salt: str, found: Sequence[Found], places: Sequence[Sequence[int]]) -> QueuedLoad:
        load = QueuedLoad()
        for each, of_rows in zip(found, places, strict=True):
            self._num_asked_bytes += sum(each.sizes)
            rows = rows_of(of_rows, self._num_groups)
            self._reading.submit(self._load, load, each, self._id_of(salt, each.piece), rows)
        return load

    def _load(self, load: QueuedLoad, found: Found, segment: SegmentId, rows: Sequence[Row]) -> None:
        is_whole, began_s, piece, num_bytes = False, time.monotonic(), found.piece, sum(found.sizes)
        try:
            if not load.is_stopped:
                if self._opened().sizes(segment) != found.sizes:
                    raise Stopped("a copy elsewhere was found, with blocks that this one lacks")
                buffers = self._memory.buffers(rows)
                self._opened().read(segment, buffers, lambda _: not load.is_stopped)
                self._memory.store(rows, buffers)
                is_whole = True
        except Damaged as error:
            self._count_damaged(error)
            self._say(piece, is_there=False)
        except Missing:
            self._say(piece, is_there=False)
        except Stopped:
            pass  # nobody wants it any more, or not this copy
        except Exception:
            logger.exception("a KV segment could not be read")
        finally:
            if is_whole:
                own = num_bytes / max(time.monotonic() - began_s, 1e-6)
                self._bytes_per_s += _NEWEST * (own - self._bytes_per_s)
                self.use.num_read_bytes += num_bytes
            self._num_ended_bytes += num_bytes
            load.ended.append(is_whole)

    def compare(self, salt: str, piece: Piece, places: Sequence[int]) -> _Comparison:
        return _Comparison(
            self._reading.submit(self._compare, self._id_of(salt, piece), rows_of(places, self._num_groups))
        )

    def _compare(self, segment: SegmentId, rows: Sequence[Row]) -> bool | None:
        try:
            buffers = self._memory.buffers(rows)
            self._memory.fetch(rows, buffers)
            writer = self._opened().writer_if_other(segment, buffers)
        except Missing:
            return None
        except Damaged as error:
            self._count_damaged(error)
            return None
        except Exception:
            logger.exception("a KV segment could not be compared")
            return None
        if writer is None:
            return True
        num_dropped = self._drop_writers({writer, self._writer})
        logger.error(
            "KV directory: segment %s is not what its tokens give when they are computed again. All %d segments of its "
            "writer and of this engine are removed. Suspect this machine, the one that wrote it, or a fault in inferd",
            segment.key.hex(),
            num_dropped,
        )
        return False

    def distrust(self) -> None:
        """Remove all that this engine wrote: some of it was found wrong elsewhere."""
        self._reading.submit(self._drop_writers, {self._writer})

    def _drop_writers(self, writers: Collection[bytes]) -> int:
        """Remove all that these wrote. Loads wait meanwhile: they run on this thread."""
        self._num_distrusts += 1
        num_dropped = 0
        try:
            num_dropped = self._opened().drop_writers(writers)
        except (OSError, Missing):
            logger.exception("KV segments that may be wrong could not be removed")
        self._say(None, is_there=False)
        self.use.num_distrusted += num_dropped
        return num_dropped

    def seconds_to_load(self, salt: str, found: Sequence[Found]) -> float:
        num_bytes = sum(sum(each.sizes) for each in found)
        return (self._num_asked_bytes - self._num_ended_bytes + num_bytes) / self._bytes_per_s

    def _say(self, piece: Piece | None, *, is_there: bool) -> None:
        if self.news is not None:
            self.news.append((piece, is_there))

    def _count_damaged(self, error: Damaged) -> None:
        self.use.num_damaged += 1
        self._tell(error)

    # -- writing -----------------------------------------------------------------------------------------------------

    def offer(self, salt: str, piece: Piece, places: Sequence[int]) -> None:
        if self._num_known_distrusts != self._num_distrusts:
            self._num_known_distrusts = self._num_distrusts
            self._known.clear()
        while self._unknown:
            self._known.pop(self._unknown.popleft(), None)
        now = time.monotonic()
        if now - self._known.get(piece, float("-inf")) < _KNOWN_S:
            return
        try:
            segment, num_erased = self._id_of(salt, piece), self._num_erased(places)
            self._queue.put_nowait(_Offered(piece, segment, tuple(places), num_erased, self._num_distrusts))
        except queue.Full:
            self.use.num_unwritten += 1
            return
        self._known[piece] = now
        self._known.move_to_end(piece)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def forget(self, salt: str, keys: Sequence[bytes]) -> None:
        variants = [Piece(key, 0, 0, has_state) for key in keys for has_state in (False, True)]
        self._remove_later(_Forgotten(tuple(self._id_of(salt, piece) for piece in variants)))

    def clear(self) -> None:
        self._remove_later(_Forgotten(None))

    def _remove_later(self, forgotten: _Forgotten) -> None:
        """Remove segments behind what was offered before. It must not be lost, so it may wait for room."""
        threading.Thread(target=self._queue.put, args=(forgotten,), daemon=True).start()
        self._known.clear()

    @property
    def num_waiting(self) -> int:
        """Pieces that are or will be written."""
        return self._queue.unfinished_tasks

    def wait_written(self, within_s: float = _LAST_WRITES_S) -> None:
        """Wait until nothing waits to be written, or for so many seconds. Any thread may call it."""
        until_s = time.monotonic() + within_s
        while self.num_waiting and time.monotonic() < until_s:
            time.sleep(_LOOK_S)

    def _write_all(self) -> None:
        while True:
            task = self._queue.get()
            try:
                if isinstance(task, _Forgotten):
                    self._remove(task)
                else:
                    self._write(task)
            except Exception:
                logger.exception("a KV segment could not be written or removed")
            finally:
                self._queue.task_done()

    def _remove(self, forgotten: _Forgotten) -> None:
        directory = self._opened()
        for segment in forgotten.segments or ():
            try:
                directory.remove(segment)
            except OSError as error:
                self._tell(error)
        if forgotten.segments is None:
            num_removed = directory.drop_model(self._fingerprint)
            self.use.num_held_bytes = directory.used_bytes
            self._say(None, is_there=False)
            logger.info("KV directory: all %d segments of this model are removed, as was asked", num_removed)

    def _write(self, offered: _Offered) -> None:
        rows = rows_of(offered.places, self._num_groups)
        buffers = self._memory.buffers(rows)
        num_written, is_copied = 0, False

        def pace(num_bytes: int) -> bool:
            nonlocal num_written, is_copied
            time.sleep(num_bytes / _WRITE_BYTES_PER_S)
            num_written += num_bytes
            is_trusted = offered.num_distrusts == self._num_distrusts
            if is_copied:
                return is_trusted
            is_copied = self._memory.fetch(rows, buffers)
            return is_trusted and self._num_erased(offered.places) == offered.num_erased

        try:
            directory = self._opened()
            if directory.write(offered.segment, buffers, self._writer, pace):
                self.use.num_written_bytes += num_written
                if offered.num_distrusts != self._num_distrusts:
                    directory.remove(offered.segment)  # it may have appeared behind those that were removed
                    return
            self.use.num_held_bytes = directory.used_bytes
            self._say(offered.piece, is_there=True)
        except Stopped:
            self._unknown.append(offered.piece)  # its places hold something else by now
        except (NotWritten, Missing) as error:
            self._unknown.append(offered.piece)
            self.use.num_unwritten += 1
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        """Warn, but not again soon."""
        now = time.monotonic()
        if now - self._told_s.get(type(error), float("-inf")) >= _TELL_AFTER_S:
            self._told_s[type(error)] = now
            logger.warning("KV directory: %s", error)
