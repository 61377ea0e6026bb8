"""Responses that were kept: found by id and by item, bounded in bytes and in time, each seen by its own key alone.

Kept in memory, and gone with the process. Where the room is needed, the key that fills most of it gives up what it used
longest ago. Safe from any thread. Knows no HTTP.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

_ENTRY_BYTES = 1_024
"""What an entry costs beside its texts: the object, the keys of two dicts."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One response, as JSON."""

    id: str
    response: bytes
    context: bytes
    """The list of all items that came before its output, each with an id."""
    item_ids: tuple[str, ...] = ()
    """Of its input and its output."""

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.context) + sum(map(len, self.item_ids)) + _ENTRY_BYTES


@dataclass(slots=True)
class _Tenant:
    """What one key has stored, in order of use."""

    entries: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    by_item: dict[str, str] = field(default_factory=dict)
    """Item id -> id of the newest response that has it."""
    num_bytes: int = 0


class ResponseStore:
    """The stored responses of all keys."""

    def __init__(self, max_bytes: int, ttl_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._ttl_s, self._now_s = max_bytes, ttl_s, now_s
        self._tenants: dict[str, _Tenant] = {}
        self._ends_s: OrderedDict[tuple[str, str], float] = OrderedDict()
        """(key, response) -> when its time is over; the soonest first, for all have the same time."""
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def keeps_any(self) -> bool:
        """Whether there is room for anything."""
        return self._max_bytes > _ENTRY_BYTES

    def put(self, tenant: str, stored: Stored) -> bool:
        """Keep a response, in place of one with its id; False where it alone is more than there is room for."""
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
            kept.by_item.update(dict.fromkeys(stored.item_ids, stored.id))
            kept.num_bytes += stored.num_bytes
            self._num_bytes += stored.num_bytes
            return True

    def get(self, tenant: str, response_id: str) -> Stored | None:
        """None where there is none, also where another key has one."""
        with self._lock:
            self._forget_expired()
            kept = self._tenants.get(tenant, _Tenant())
            if response_id in kept.entries:
                kept.entries.move_to_end(response_id)
            return kept.entries.get(response_id)

    def with_item(self, tenant: str, item_id: str) -> Stored | None:
        """The newest response that this item is of."""
        with self._lock:
            self._forget_expired()
            kept = self._tenants.get(tenant, _Tenant())
            return kept.entries.get(kept.by_item.get(item_id, ""))

    def delete(self, tenant: str, response_id: str) -> bool:
        """Whether there was one."""
        with self._lock:
            self._forget_expired()
            return self._drop(tenant, response_id)

    def _drop(self, tenant: str, response_id: str) -> bool:
        kept = self._tenants.get(tenant)
        if kept is None or response_id not in kept.entries:
            return False
        stored = kept.entries.pop(response_id)
        del self._ends_s[tenant, response_id]
        for item_id in stored.item_ids:
            if kept.by_item.get(item_id) == response_id:
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
