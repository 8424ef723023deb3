import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.scheduler.core.page_pool import CACHED, FREE, LIVE, QUARANTINED, PageFault, PagePool


class PoolModel(RuleBasedStateMachine):
    """The pool against plain sets of pages."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(20)
        self.live: set[int] = set()
        self.cached: set[int] = set()
        self.held: list[tuple[int, set[int]]] = []

    @property
    def num_free(self) -> int:
        return 20 - len(self.live) - len(self.cached) - sum(len(pages) for _, pages in self.held)

    @rule(num=st.integers(0, 25))
    def alloc(self, num):
        if num > self.num_free:
            with pytest.raises(PageFault, match="free"):
                self.pool.alloc(num)
            return
        pages = self.pool.alloc(num).tolist()
        assert len(set(pages)) == num and not set(pages) & (self.live | self.cached)
        assert not any(set(pages) & held for _, held in self.held)
        self.live |= set(pages)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), fate=st.sampled_from(["free", "cache", "quarantine"]), step=st.integers(0, 5))
    def leave(self, data, fate, step):
        pages = data.draw(st.sets(st.sampled_from(sorted(self.live)), min_size=1))
        array = np.array(sorted(pages), np.int32)
        self.live -= pages
        if fate == "free":
            self.pool.free(array)
        elif fate == "cache":
            self.pool.to_cache(array)
            self.cached |= pages
        else:
            self.pool.quarantine(array, step)
            self.held.append((step, pages))

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def evict(self, data):
        pages = data.draw(st.sets(st.sampled_from(sorted(self.cached)), min_size=1))
        self.pool.free(np.array(sorted(pages), np.int32))
        self.cached -= pages

    @rule(step=st.integers(0, 5))
    def retire(self, step):
        self.pool.retire(step)
        self.held = [(until, pages) for until, pages in self.held if until > step]

    @invariant()
    def agrees(self):
        self.pool.check()
        assert self.pool.num_free == self.num_free == self.pool.count(FREE)
        assert self.pool.count(LIVE) == len(self.live) and self.pool.count(CACHED) == len(self.cached)
        assert self.pool.num_quarantined == self.pool.count(QUARANTINED) == sum(len(p) for _, p in self.held)


TestPoolModel = PoolModel.TestCase
TestPoolModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def _pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_double_free_is_found_where_it_happens():
    pool = PagePool(4)
    pages = pool.alloc(2)
    pool.free(pages)
    with pytest.raises(PageFault, match="page 0 is free"):
        pool.free(pages)


def test_page_named_twice_is_refused():
    pool = PagePool(4)
    pool.alloc(2)
    with pytest.raises(PageFault, match="twice"):
        pool.free(_pages(1, 1))
    assert pool.count(LIVE) == 2


def test_cached_page_cannot_be_quarantined_or_cached_again():
    pool = PagePool(4)
    pages = pool.alloc(1)
    pool.to_cache(pages)
    with pytest.raises(PageFault, match="cached"):
        pool.quarantine(pages, 1)
    with pytest.raises(PageFault, match="cached"):
        pool.to_cache(pages)


def test_quarantine_is_kept_until_its_own_step():
    pool = PagePool(2)
    first, second = pool.alloc(1), pool.alloc(1)
    pool.quarantine(first, 3)
    pool.quarantine(second, 2)
    pool.retire(2)
    assert pool.alloc(1).tolist() == second.tolist()
    with pytest.raises(PageFault):
        pool.alloc(1)
    pool.retire(3)
    assert pool.alloc(1).tolist() == first.tolist()
