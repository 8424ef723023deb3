"""Order of requests that wait: by priority, then fairly between tenants, then by arrival.

Owns nothing but the order; items are opaque. Fairness is start-time fair queueing: each tenant has an account of
what it was served, in units of `cost`, and among the tenants waiting within the most urgent priority the smallest
account is next. A tenant that had nothing waiting resumes no lower than the account served last, so silence
earns no credit, and one that sends a flood delays only itself.
"""

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_IDLE_ACCOUNTS = 1024
"""Accounts of tenants with nothing waiting that a priority remembers before it drops those that no longer matter.

All of them are dropped when nothing waits any more.
"""


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    number: int
    item: T
    priority: int
    tenant: str
    cost: int


@dataclass(slots=True)
class _Level:
    """What waits within one priority.

    Attributes:
        heaps: tenant -> heap of (arrival, number of entry, uid); the head of each is an entry that still waits.
        accounts: tenant -> what it was served.
        clock: account of the tenant served last, before its charge.
    """

    heaps: dict[str, list[tuple[int, int, str]]] = field(default_factory=dict)
    accounts: dict[str, float] = field(default_factory=dict)
    clock: float = 0.0

    def resume(self, tenant: str) -> None:
        """Let a tenant that had nothing waiting take part again."""
        if len(self.accounts) > MAX_IDLE_ACCOUNTS + len(self.heaps):
            self.accounts = {t: a for t, a in self.accounts.items() if a > self.clock or t in self.heaps}
        self.accounts[tenant] = max(self.accounts.get(tenant, 0.0), self.clock)

    def next(self) -> str:
        """The tenant whose turn it is."""
        return min(self.heaps, key=lambda tenant: (self.accounts[tenant], self.heaps[tenant][0]))


class WaitingQueue(Generic[T]):
    """A queue with removal by uid. Not thread-safe; push and pop cost O(log n + tenants)."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._entries: dict[str, _Entry[T]] = {}
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
            cost: what serving it takes, in any one unit (tokens, say); at least 1.
        """
        self.remove(uid)
        entry = _Entry(next(self._numbers), item, priority, tenant, max(1, cost))
        self._entries[uid] = entry
        level = self._levels.setdefault(priority, _Level())
        if tenant not in level.heaps:
            level.resume(tenant)
        heapq.heappush(level.heaps.setdefault(tenant, []), (arrival_ms, entry.number, uid))

    def pop(self) -> T:
        """Take the next item and charge its tenant.

        Raises:
            IndexError: nothing waits.
        """
        uid = self._head()
        if uid is None:
            raise IndexError("pop from an empty queue")
        entry = self._entries[uid]
        level = self._levels[entry.priority]
        level.clock = max(level.clock, level.accounts[entry.tenant])
        level.accounts[entry.tenant] += entry.cost
        self.remove(uid)
        return entry.item

    def remove(self, uid: str) -> T | None:
        """Take an item out of turn, without charge; None when it does not wait."""
        entry = self._entries.pop(uid, None)
        if entry is None:
            return None
        level = self._levels[entry.priority]
        heap = level.heaps[entry.tenant]
        while heap and not self._waits(heap[0]):
            heapq.heappop(heap)
        if not heap:
            del level.heaps[entry.tenant]
            if not level.heaps:
                del self._levels[entry.priority]
        return entry.item

    def _head(self) -> str | None:
        """Uid that is next."""
        if not self._levels:
            return None
        level = self._levels[min(self._levels)]
        return level.heaps[level.next()][0][2]

    def _waits(self, place: tuple[int, int, str]) -> bool:
        entry = self._entries.get(place[2])
        return entry is not None and entry.number == place[1]
