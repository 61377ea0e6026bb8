"""Holds the valid keys: those of the settings and those of the keys file, which it reads again when the file changes.

If the file is malformed or cannot be reached (a network mount hangs), the old keys stay valid. The log and the metrics
then say so. This file knows no HTTP.
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
"""Seconds between two checks of the file. If a volume swaps symbolic links, the inode behind them changes."""

OVERDUE_S = 10.0
"""Seconds after which a check of the file that has not ended is reported."""

_Mark = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a key."""

    digest: bytes
    tenant: str
    """Id under which cached prefixes, stored responses and the fair share are kept."""
    weight: float = 1.0
    account: KeyAccount | None = None
    """Use of the key's quota; None for keys without one."""
    is_admin: bool = False


class Keyring:
    """All valid keys. It belongs to the event loop, and reads the file on a thread."""

    def __init__(
        self,
        keys: Iterable[str] = (),
        admin_keys: Iterable[str] = (),
        path: Path | None = None,
        on_read: Callable[[int, bool], None] = lambda num_keys, is_good: None,
        on_age: Callable[[float], None] = lambda age_s: None,
        on_tenants: Callable[[Mapping[str, str]], None] = lambda names: None,
    ) -> None:
        """`on_read` is called after each reading of the file, with the number of its keys that are now valid and
        whether the reading succeeded. `on_age` is called at each check, with the seconds since the valid keys were last
        found to match the file. `on_tenants` is called with the name of each tenant of the file by its id, in the
        file's order; a key without a tenant has its own name. Raises `ConfigError`.
        """
        self._path, self._on_read, self._on_age, self._on_tenants = path, on_read, on_age, on_tenants
        self._known_s = time.monotonic()
        """When the valid keys were last found to match the file."""
        self._fixed = {digest: Holder(digest, tenant_id(digest)) for digest in map(digest_of, keys)}
        self._fixed |= {
            digest: Holder(digest, tenant_id(digest), is_admin=True) for digest in map(digest_of, admin_keys)
        }
        self._from_file: Mapping[bytes, Holder] = {}
        self._mark: _Mark | None = None
        """Version of the file at the last check."""
        self._known_mark: _Mark | None = None
        """Version of the file that holds the valid keys."""
        self._complaint = ""
        """Error of the last reading of the file; empty if there was none."""
        if path is not None:
            self._mark = self._known_mark = _mark_of(path)
            self._replace(read_keys(path))

    @property
    def has_admins(self) -> bool:
        return any(holder.is_admin for holder in self._fixed.values())

    @property
    def is_open(self) -> bool:
        """Whether clients need no key. An admin key alone protects nothing but the admin routes."""
        return self._path is None and all(holder.is_admin for holder in self._fixed.values())

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a client's nor an admin's key."""
        return self._path is None and not self._fixed

    def find(self, key: str) -> Holder | None:
        """The holder of a key. The lookup is by digest, whose digits a caller cannot choose, so that its duration says
        nothing about a key. Digests are then compared in constant time."""
        digest = digest_of(key)
        holder = self._fixed.get(digest) or self._from_file.get(digest)
        return holder if holder is not None and hmac.compare_digest(holder.digest, digest) else None

    async def watch(self, look_s: float = LOOK_S) -> None:
        """Read the file again whenever it changes, until this task is cancelled."""
        while self._path is not None:
            await asyncio.sleep(look_s)
            await self.look()

    async def look(self, tick_s: float = LOOK_S) -> None:
        """Read the file if it changed since the last check. Reports the age of the keys every `tick_s` meanwhile."""
        assert self._path is not None, "there is no keys file"
        began_s, is_overdue = time.monotonic(), False
        reading = _in_daemon_thread(partial(_read_if_changed, self._path, self._mark))
        while not (await asyncio.wait((reading,), timeout=tick_s))[0]:
            self._on_age(time.monotonic() - self._known_s)
            if not is_overdue and time.monotonic() - began_s > OVERDUE_S:
                is_overdue = True
                logger.error(
                    "reading the keys file %s hangs: changes, such as revoked keys, take effect only when it is read",
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
        """Log a new error once. A malformed file is read again when it changes, an unreadable one at each check."""
        if not isinstance(error.__cause__, OSError):
            self._mark = mark
        if str(error) == self._complaint:
            return
        self._complaint = str(error)
        logger.error(
            "%s; the %d keys that were read before stay valid",
            error,
            len(self._from_file),
            exc_info=None if isinstance(error, ConfigError) else error,
        )
        self._on_read(len(self._from_file), False)

    def _replace(self, entries: Iterable[KeyEntry]) -> None:
        """Replace all keys of the file at once. A key that stays keeps its use of the quota."""
        entries = tuple(entries)
        self._from_file = {entry.digest: self._holder(entry) for entry in entries}
        self._on_tenants({entry.tenant_id: entry.tenant or entry.name for entry in entries})
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
    """(version of the file, its entries or its error). The second is None if the version is still `mark`."""
    found = _mark_of(path)
    if found == mark:
        return found, None
    try:
        return found, read_keys(path)
    except Exception as error:
        return found, error


def _in_daemon_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Like `asyncio.to_thread`, but a thread that never ends does not keep the loop or the process from ending.

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
    """The version of a file, by inode, time and size; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
