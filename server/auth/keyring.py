"""Which keys are known now: those of the settings and those of the keys file, which is read again when it changes.

A file that cannot be read whole changes nothing: the old keys stay, and log and metric say so. Nor does one that cannot
be reached, as on a network mount that hangs: the log and the age of the keys say so. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from inferd.engine.api.errors import ConfigError
from inferd.server.auth.keys_file import KeyEntry, digest_of, read_keys, tenant_id
from inferd.server.auth.quotas import KeyAccount, Quota

logger = logging.getLogger("inferd.keys")

T = TypeVar("T")

LOOK_S = 1.0
"""Between two looks at the file; where a volume swaps symbolic links, the inode behind them changes."""

OVERDUE_S = 10.0
"""A look at the file that takes longer is reported."""

_Mark = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Holder:
    """Who a key belongs to."""

    digest: bytes
    tenant: str
    """What its prefixes, stored responses and fair share are kept under."""
    weight: float = 1.0
    account: KeyAccount | None = None
    """None: no quota."""
    is_admin: bool = False


class Keyring:
    """Belongs to the event loop; the file is read on a thread."""

    def __init__(
        self,
        keys: Iterable[str] = (),
        admin_keys: Iterable[str] = (),
        path: Path | None = None,
        on_read: Callable[[int, bool], None] = lambda num_keys, is_good: None,
        on_age: Callable[[float], None] = lambda age_s: None,
    ) -> None:
        """`on_read`: told of each reading of the file, with the keys now known from it. `on_age`: told at each look how
        many seconds ago the keys in force were last seen to be the file's. Raises `ConfigError`.
        """
        self._path, self._on_read, self._on_age = path, on_read, on_age
        self._known_s = time.monotonic()
        """When the keys in force were last seen to be those of the file."""
        self._fixed = {digest: Holder(digest, tenant_id(digest)) for digest in map(digest_of, keys)}
        self._fixed |= {
            digest: Holder(digest, tenant_id(digest), is_admin=True) for digest in map(digest_of, admin_keys)
        }
        self._from_file: Mapping[bytes, Holder] = {}
        self._mark: _Mark | None = None
        """Version of the file at the last look."""
        self._known_mark: _Mark | None = None
        """Version of the file whose keys are in force."""
        self._complaint = ""
        """What was wrong with the file when it was last read."""
        if path is not None:
            self._mark = self._known_mark = _mark_of(path)
            self._replace(read_keys(path))

    @property
    def has_admins(self) -> bool:
        return any(holder.is_admin for holder in self._fixed.values())

    @property
    def is_open(self) -> bool:
        """Whether callers need no key; an admin's alone closes nothing but the admin routes."""
        return self._path is None and all(holder.is_admin for holder in self._fixed.values())

    @property
    def is_empty(self) -> bool:
        """Whether there is no key at all."""
        return self._path is None and not self._fixed

    def find(self, key: str) -> Holder | None:
        """Whose key it is. The table is asked by the key's digest, of which a caller cannot choose a digit, so that
        what looking it up takes says nothing about a key; digests are then compared whole and in constant time."""
        digest = digest_of(key)
        holder = self._fixed.get(digest) or self._from_file.get(digest)
        return holder if holder is not None and hmac.compare_digest(holder.digest, digest) else None

    async def watch(self, look_s: float = LOOK_S) -> None:
        """Read the file again whenever it changes, until cancelled."""
        while self._path is not None:
            await asyncio.sleep(look_s)
            await self.look()

    async def look(self, tick_s: float = LOOK_S) -> None:
        """Read the file if it is another one than last time. Reports the age of the keys every `tick_s` meanwhile."""
        assert self._path is not None, "there is no keys file"
        began_s, is_overdue = time.monotonic(), False
        reading = _in_daemon_thread(partial(_read_if_changed, self._path, self._mark))
        while not (await asyncio.wait((reading,), timeout=tick_s))[0]:
            self._on_age(time.monotonic() - self._known_s)
            if not is_overdue and time.monotonic() - began_s > OVERDUE_S:
                is_overdue = True
                logger.error(
                    "reading the keys file %s hangs: its changes, such as a revoked key, take effect afterwards",
                    self._path,
                )
        if is_overdue:
            logger.warning("the keys file %s can be read again", self._path)
        mark, found = reading.result()
        if isinstance(found, Exception):
            self._complain(mark, found)
        elif found is not None:
            self._mark = self._known_mark = mark
            self._complaint = ""
            self._replace(found)
            logger.info("read %d keys from %s", len(found), self._path)
        if mark == self._known_mark:
            self._known_s = time.monotonic()
        self._on_age(time.monotonic() - self._known_s)

    def _complain(self, mark: _Mark | None, error: Exception) -> None:
        """Report once what is wrong. A malformed file is read again when it changes, an unreadable one at each look."""
        if not isinstance(error.__cause__, OSError):
            self._mark = mark
        if str(error) == self._complaint:
            return
        self._complaint = str(error)
        logger.error(
            "%s; the %d keys read before stay in force",
            error,
            len(self._from_file),
            exc_info=None if isinstance(error, ConfigError) else error,
        )
        self._on_read(len(self._from_file), False)

    def _replace(self, entries: Iterable[KeyEntry]) -> None:
        """All at once; a key that stays keeps what it used of its quota."""
        self._from_file = {entry.digest: self._holder(entry) for entry in entries}
        self._on_read(len(self._from_file), True)

    def _holder(self, entry: KeyEntry) -> Holder:
        quota = Quota(entry.concurrent_requests, entry.requests_per_minute, entry.tokens_per_minute)
        known = self._from_file.get(entry.digest)
        account = known.account if known is not None else None
        if account is None:
            account = KeyAccount(quota)
        else:
            account.apply(quota)
        return Holder(entry.digest, entry.tenant_id, entry.weight, account)


def _read_if_changed(path: Path, mark: _Mark | None) -> tuple[_Mark | None, tuple[KeyEntry, ...] | Exception | None]:
    """(what tells its version, its entries or what is wrong with it); None: it is the version of `mark`."""
    found = _mark_of(path)
    if found == mark:
        return found, None
    try:
        return found, read_keys(path)
    except Exception as error:
        return found, error


def _in_daemon_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """As `asyncio.to_thread`, but a thread that never ends keeps neither the loop nor the process from ending.

    `work` raises nothing.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(result: T) -> None:
        if not future.done():
            future.set_result(result)

    def run() -> None:
        result = work()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, result)

    threading.Thread(target=run, name="inferd-keys-file", daemon=True).start()
    return future


def _mark_of(path: Path) -> _Mark | None:
    """What tells one version of a file from another; None: it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
