"""The page table: which pages hold the KV of each slot, and the one place where pages change hands.

Page of token t of a slot is pages[slot, t // page_size]. A row of the table has three parts:

    [ shared with the prefix cache ... | own ... | unused: 0 ]
      num_shared                        num_pages

Shared pages are the cache's and pinned by the slot's handle; own pages are live. When a prefix is given to the
cache, own pages become shared, and where the cache had others already the slot takes those and gives its own back.
"""

from collections import deque

import numpy as np

from services.scheduler.core.batch import IntArray
from services.scheduler.core.page_pool import CACHED, FREE, LIVE, PagePool
from services.scheduler.core.ports import EngineLimits
from services.scheduler.core.prefix_cache import PrefixCache, PrefixHandle


class PageTable:
    """Pages of every slot, on top of the pool and the prefix cache."""

    def __init__(self, limits: EngineLimits, cache: PrefixCache) -> None:
        self.page_size = limits.page_size
        self.pool = PagePool(limits.num_pages)
        self.cache = cache
        columns = min(self.pages_for(limits.max_seq_len), limits.num_pages)
        self.pages: IntArray = np.zeros((limits.max_running, columns), np.int32)
        self.num_pages: IntArray = np.zeros(limits.max_running, np.int32)
        self.num_shared: IntArray = np.zeros(limits.max_running, np.int32)
        self.num_evicted = 0
        self._handles: dict[int, PrefixHandle] = {}
        self._unlocks: deque[tuple[int, PrefixHandle]] = deque()

    @property
    def num_available(self) -> int:
        """Pages that can be had now: free ones, and those that the cache can give up."""
        return self.pool.num_free + self.cache.num_evictable

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many tokens need."""
        return -(-num_tokens // self.page_size)

    def pin(self, namespace: str, token_ids: IntArray) -> tuple[PrefixHandle, IntArray]:
        """Find and lock the cached part of a prefix; `open` or `unpin` must follow."""
        handle, pages = self.cache.match(namespace, token_ids)
        self.cache.lock(handle)
        return handle, pages

    def unpin(self, handle: PrefixHandle) -> None:
        """Undo `pin`."""
        self.cache.unlock(handle)

    def open(self, slot: int, handle: PrefixHandle, cached: IntArray, num_tokens: int) -> None:
        """Give a slot its pinned prefix, and own pages up to `num_tokens`; there must be as many available."""
        num_shared, num_pages = len(cached), self.pages_for(num_tokens)
        self.pages[slot, :num_shared] = cached
        self.pages[slot, num_shared:num_pages] = self._alloc(num_pages - num_shared)
        self.num_shared[slot], self.num_pages[slot] = num_shared, num_pages
        self._handles[slot] = handle

    def missing(self, slots: IntArray, positions: IntArray) -> IntArray:
        """Which of these slots have no page yet for a token at their position."""
        needy: IntArray = slots[positions >= self.num_pages[slots] * self.page_size]
        return needy

    def grow(self, slots: IntArray) -> None:
        """Give each slot one more page; there must be as many available."""
        if len(slots):
            self.pages[slots, self.num_pages[slots]] = self._alloc(len(slots))
            self.num_pages[slots] += 1

    def rows(self, slots: IntArray, num_tokens: int) -> IntArray:
        """The table of some slots, as wide as `num_tokens` need: (rows, columns), a copy."""
        rows: IntArray = self.pages[slots, : self.pages_for(num_tokens)]
        return rows

    def share(self, slot: int, namespace: str, token_ids: IntArray, last_step: int, settled_step: int) -> None:
        """Give computed tokens of a slot to the prefix cache; the slot goes on using their pages.

        Args:
            slot: whose.
            namespace: of the request.
            token_ids: tokens from the start whose KV settled steps have computed.
            last_step: last launched step that refers to the slot; duplicates are held back until it has retired.
            settled_step: last step that has.
        """
        full = len(token_ids) // self.page_size
        start = int(self.num_shared[slot])
        if full <= start:
            return
        row = self.pages[slot, :full].copy()
        done = self.cache.insert(namespace, token_ids, row)
        num_known = len(done.known)
        self.pool.to_cache(done.taken)
        shared = num_known + len(done.taken)
        if shared < full:
            return
        self._give_back(row[start:num_known], last_step, settled_step)
        self.pages[slot, :num_known] = done.known
        self.num_shared[slot] = shared
        self.cache.lock(done.handle)
        self.cache.unlock(self._handles[slot])
        self._handles[slot] = done.handle

    def close(self, slot: int, last_step: int, settled_step: int) -> None:
        """Take a slot's pages and pin; what launched steps refer to is held back until they have retired."""
        own = self.pages[slot, self.num_shared[slot] : self.num_pages[slot]].copy()
        handle = self._handles.pop(slot)
        self._give_back(own, last_step, settled_step)
        if last_step > settled_step:
            self._unlocks.append((last_step, handle))
        else:
            self.cache.unlock(handle)
        self.pages[slot, : self.num_pages[slot]] = 0
        self.num_pages[slot] = self.num_shared[slot] = 0

    def retire(self, step: int) -> None:
        """Let go of what was held back for steps up to `step`."""
        self.pool.retire(step)
        for _ in range(len(self._unlocks)):
            until, handle = self._unlocks.popleft()
            if until <= step:
                self.cache.unlock(handle)
            else:
                self._unlocks.append((until, handle))

    def check(self) -> None:
        """Check that every page is free, live, cached or held back, once; AssertionError says what is wrong."""
        self.pool.check()
        self.cache.check()
        pool, cache = self.pool, self.cache
        slots = sorted(self._handles)
        own = [self.pages[s, self.num_shared[s] : self.num_pages[s]] for s in slots]
        live = np.concatenate(own) if own else np.empty(0, np.int32)
        assert len(np.unique(live)) == len(live) == pool.count(LIVE), "live pages differ from the table"
        assert (pool.states(live) == LIVE).all(), "a slot has a page that is not live"
        assert cache.num_pages == pool.count(CACHED), "cached pages differ from the cache"
        for slot in slots:
            shared = self.pages[slot, : self.num_shared[slot]]
            assert (pool.states(shared) == CACHED).all(), "a slot shares a page that is not cached"
            assert self._handles[slot].num_pages == len(shared), "a slot shares more or less than it pins"
        total = pool.count(FREE) + len(live) + cache.num_pages + pool.num_quarantined
        assert total == pool.num_pages, f"{total} of {pool.num_pages} pages are accounted for"
        if not slots and not self._unlocks:
            assert cache.num_evictable == cache.num_pages, "a pin is left behind"

    def _give_back(self, own: IntArray, last_step: int, settled_step: int) -> None:
        if last_step > settled_step:
            self.pool.quarantine(own, last_step)
        else:
            self.pool.free(own)

    def _alloc(self, num: int) -> IntArray:
        lacking = num - self.pool.num_free
        if lacking > 0:
            evicted = self.cache.evict(lacking)
            self.num_evicted += len(evicted)
            self.pool.free(evicted)
        return self.pool.alloc(num)
