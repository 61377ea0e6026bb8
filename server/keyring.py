"""Which keys are known now: those of the settings and those of the keys file, which is read again when it changes.

A file that cannot be read whole changes nothing: the old keys stay, and log and metric say so. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from inferd.engine.api.errors import ConfigError
from inferd.server.keys import KeyEntry, digest_of, read_keys, tenant_id
from inferd.server.quotas import KeyAccount, Quota

logger = logging.getLogger("inferd.keys")

LOOK_S = 1.0
"""Between two looks at the file; where a volume swaps symbolic links, the inode behind them changes."""

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
    ) -> None:
        """`on_read`: told of each reading of the file, with the keys now known from it. Raises `ConfigError`."""
        self._path, self._on_read = path, on_read
        self._fixed = {digest: Holder(digest, tenant_id(digest)) for digest in map(digest_of, keys)}
        self._fixed |= {
            digest: Holder(digest, tenant_id(digest), is_admin=True) for digest in map(digest_of, admin_keys)
        }
        self._from_file: Mapping[bytes, Holder] = {}
        self._mark: _Mark | None = None
        if path is not None:
            self._mark = _mark_of(path)
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
            try:
                await self.look()
            except Exception:
                logger.exception("cannot read %s; the %d keys read before stay", self._path, len(self._from_file))
                self._on_read(len(self._from_file), False)

    async def look(self) -> None:
        """Read the file if it is another one than last time."""
        assert self._path is not None, "there is no keys file"
        mark = await asyncio.to_thread(_mark_of, self._path)
        if mark == self._mark:
            return
        # Also where it cannot be read: it is said once, and tried again when it changes again.
        self._mark = mark
        try:
            entries = await asyncio.to_thread(read_keys, self._path)
        except ConfigError as error:
            logger.error("%s; the %d keys read before stay in force", error, len(self._from_file))
            self._on_read(len(self._from_file), False)
            return
        self._replace(entries)
        logger.info("read %d keys from %s", len(entries), self._path)

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


def _mark_of(path: Path) -> _Mark | None:
    """What tells one version of a file from another; None: it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
