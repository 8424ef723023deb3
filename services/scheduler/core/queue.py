"""Order of requests that wait: by priority, then fairly between tenants, then by arrival.

Owns nothing but the order; items are opaque. A tenant's turn is decided by what it was served, in units of
`cost`: among the tenants that wait within the most urgent priority, the one that was served least is next. A tenant
that comes back after a pause starts level with the least served of those waiting, so silence earns no credit.
"""

import heapq
import itertools
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    uid: str
    item: T
    priority: int
    tenant: str
    cost: int


class _Level:
    """Tenants that wait within one priority: tenant -> heap of (arrival, number of entry, uid)."""

    __slots__ = ("heaps",)

    def __init__(self) -> None:
        self.heaps: dict[str, list[tuple[int, int, str]]] = {}


class WaitingQueue(Generic[T]):
    """A queue with removal by uid. Not thread-safe; push and pop cost O(log n + tenants)."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._entries: dict[str, tuple[int, _Entry[T]]] = {}
        self._served: dict[str, float] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, uid: object) -> bool:
        return uid in self._entries

    def push(
        self, uid: str, item: T, *, priority: int = 0, tenant: str = "", arrival_ms: int = 0, cost: int = 1
    ) -> None:
        """Add an item; a uid that waits already is replaced and keeps nothing of its old place.

        Args:
            uid: name for `remove`.
            item: what `pop` gives back.
            priority: lower goes first.
            tenant: who pays; tenants of equal priority take turns.
            arrival_ms: order within a tenant; equal values go in order of `push`.
            cost: what serving it takes, in any unit used throughout (tokens, say); at least 1.
        """
        self.remove(uid)
        number = next(self._numbers)
        level = self._levels.setdefault(priority, _Level())
        if not level.heaps.get(tenant):
            self._level_up(tenant)
        self._entries[uid] = (number, _Entry(uid, item, priority, tenant, max(1, cost)))
        heapq.heappush(level.heaps.setdefault(tenant, []), (arrival_ms, number, uid))

    def peek(self) -> T | None:
        """Look at the next item without taking it; None when nothing waits."""
        place = self._next()
        return self._entries[place[2]][1].item if place is not None else None

    def pop(self) -> T:
        """Take the next item and charge its tenant.

        Raises:
            IndexError: nothing waits.
        """
        place = self._next()
        if place is None:
            raise IndexError("pop from an empty queue")
        _, entry = self._entries[place[2]]
        self._served[entry.tenant] = self._served.get(entry.tenant, 0.0) + entry.cost
        self.remove(entry.uid)
        return entry.item

    def remove(self, uid: str) -> T | None:
        """Take an item out of turn, without charge; None when it does not wait."""
        found = self._entries.pop(uid, None)
        if found is None:
            return None
        entry = found[1]
        level = self._levels[entry.priority]
        self._settle(level, entry.tenant)
        if not level.heaps:
            del self._levels[entry.priority]
        if not self._entries:
            self._served.clear()
        return entry.item

    def _next(self) -> tuple[int, int, str] | None:
        """Head of the tenant whose turn it is, in the most urgent level."""
        if not self._levels:
            return None
        level = self._levels[min(self._levels)]
        tenant = min(level.heaps, key=lambda t: (self._served.get(t, 0.0), level.heaps[t][0]))
        return level.heaps[tenant][0]

    def _settle(self, level: _Level, tenant: str) -> None:
        """Drop heads that were removed, and the tenant once nothing of it waits; keeps every head valid."""
        heap = level.heaps[tenant]
        while heap and (heap[0][2] not in self._entries or self._entries[heap[0][2]][0] != heap[0][1]):
            heapq.heappop(heap)
        if not heap:
            del level.heaps[tenant]

    def _level_up(self, tenant: str) -> None:
        """Start a tenant that had nothing waiting level with the least served of those that wait."""
        waiting = {entry.tenant for _, entry in self._entries.values()} if tenant not in self._served else None
        names = waiting if waiting is not None else {t for lv in self._levels.values() for t in lv.heaps}
        names.discard(tenant)
        if names:
            floor = min(self._served.get(name, 0.0) for name in names)
            self._served[tenant] = max(self._served.get(tenant, 0.0), floor)
