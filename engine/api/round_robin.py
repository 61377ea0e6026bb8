"""A queue in which tenants take turns, so that a tenant with many items delays another one by one item only."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class RoundRobin(Generic[T]):
    """A tenant's own items are taken in the order in which they were added."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        """Items by tenant; the tenant whose turn is next comes first."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, tenant: str, item: T) -> None:
        self._waiting.setdefault(tenant, deque()).append(item)

    def take(self) -> T:
        """The item whose turn it is. There must be one."""
        tenant, items = next(iter(self._waiting.items()))
        item = items.popleft()
        if items:
            self._waiting.move_to_end(tenant)
        else:
            del self._waiting[tenant]
        return item

    def num_before(self, tenant: str) -> int:
        """Most items that may be taken before the tenant's next one."""
        num_own = len(self._waiting.get(tenant, ()))
        others = (len(items) for owner, items in self._waiting.items() if owner != tenant)
        return num_own + sum(min(num, num_own + 1) for num in others)
