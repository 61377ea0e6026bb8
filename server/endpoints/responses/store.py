"""Stores responses in memory, up to a number of bytes and for a time. Only the key that made a response can see it.

If memory is needed, the tenant with the most bytes loses its least recently used response. Everything is lost with the
process. The store is thread-safe and knows no HTTP.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

_ENTRY_BYTES = 1_024
"""Bytes of an entry besides its texts: the object, and the keys of two dicts."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One response, as JSON."""

    id: str
    response: bytes
    context: bytes
    """The list of all items before its output, each with an id."""
    item_ids: tuple[str, ...] = ()
    """Ids of the items of its input and output."""

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.context) + sum(map(len, self.item_ids)) + _ENTRY_BYTES


@dataclass(slots=True)
class _Tenant:
    """The responses of one tenant, in order of use."""

    entries: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    by_item: dict[str, list[str]] = field(default_factory=dict)
    """Item id -> ids of the responses that have it, the newest last: each response of a conversation has all before."""
    num_bytes: int = 0


class ResponseStore:
    """The stored responses of all tenants."""

    def __init__(self, max_bytes: int, ttl_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._ttl_s, self._now_s = max_bytes, ttl_s, now_s
        self._tenants: dict[str, _Tenant] = {}
        self._ends_s: OrderedDict[tuple[str, str], float] = OrderedDict()
        """(tenant, response id) -> when it expires. The soonest is first, because all have the same lifetime."""
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def keeps_any(self) -> bool:
        """Whether the store has space for any response."""
        return self._max_bytes > _ENTRY_BYTES

    def put(self, tenant: str, stored: Stored) -> bool:
        """Store a response, in place of one with the same id. Returns False if it exceeds the whole store."""
        with self._lock:
            self._drop(tenant, stored.id)
            self._forget_expired()
            if stored.num_bytes > self._max_bytes:
                return False
            while self._num_bytes + stored.num_bytes > self._max_bytes:
                self._evict()
            kept = self._tenants.setdefault(tenant, _Tenant())
            kept.entries[stored.id] = stored
            self._ends_s[tenant, stored.id] = self._now_s() + self._ttl_s
            for item_id in dict.fromkeys(stored.item_ids):
                kept.by_item.setdefault(item_id, []).append(stored.id)
            kept.num_bytes += stored.num_bytes
            self._num_bytes += stored.num_bytes
            return True

    def get(self, tenant: str, response_id: str) -> Stored | None:
        """The response, or None if this tenant has none with this id."""
        with self._lock:
            self._forget_expired()
            kept = self._tenants.get(tenant, _Tenant())
            if response_id in kept.entries:
                kept.entries.move_to_end(response_id)
            return kept.entries.get(response_id)

    def with_item(self, tenant: str, item_id: str) -> Stored | None:
        """The newest response that has this item."""
        with self._lock:
            self._forget_expired()
            kept = self._tenants.get(tenant, _Tenant())
            return kept.entries[kept.by_item[item_id][-1]] if item_id in kept.by_item else None

    def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response. Returns whether there was one."""
        with self._lock:
            self._forget_expired()
            return self._drop(tenant, response_id)

    def _drop(self, tenant: str, response_id: str) -> bool:
        kept = self._tenants.get(tenant)
        if kept is None or response_id not in kept.entries:
            return False
        stored = kept.entries.pop(response_id)
        del self._ends_s[tenant, response_id]
        for item_id in dict.fromkeys(stored.item_ids):
            kept.by_item[item_id].remove(response_id)
            if not kept.by_item[item_id]:
                del kept.by_item[item_id]
        kept.num_bytes -= stored.num_bytes
        self._num_bytes -= stored.num_bytes
        if not kept.entries:
            del self._tenants[tenant]
        return True

    def _evict(self) -> None:
        tenant, kept = max(self._tenants.items(), key=lambda item: item[1].num_bytes)
        self._drop(tenant, next(iter(kept.entries)))

    def _forget_expired(self) -> None:
        now_s = self._now_s()
        while self._ends_s:
            (tenant, response_id), end_s = next(iter(self._ends_s.items()))
            if end_s > now_s:
                return
            self._drop(tenant, response_id)
