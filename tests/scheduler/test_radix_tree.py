import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.core.prefix_cache import NaiveCache
from services.scheduler.core.radix_tree import RadixTree

TOKENS = st.lists(st.integers(0, 2), max_size=14)
NAMESPACES = st.sampled_from(["", "salt"])


def _ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


class TreeModel(RuleBasedStateMachine):
    """The tree against a dictionary of whole prefixes: (namespace, tokens up to a page's end) -> page."""

    @initialize(page_size=st.integers(1, 3))
    def start(self, page_size):
        self.size = page_size
        self.tree = RadixTree(page_size)
        self.pages: dict[tuple, int] = {}
        self.locked: list[tuple] = []
        self.next_page = 0

    def _prefixes(self, namespace, tokens):
        return [(namespace, *tokens[: end * self.size]) for end in range(1, len(tokens) // self.size + 1)]

    def _known(self, namespace, tokens):
        known = []
        for prefix in self._prefixes(namespace, tokens):
            if prefix not in self.pages:
                break
            known.append(self.pages[prefix])
        return known

    @rule(namespace=NAMESPACES, tokens=TOKENS, lock=st.booleans())
    def match(self, namespace, tokens, lock):
        handle, pages = self.tree.match(namespace, _ids(*tokens))
        known = self._known(namespace, tokens)
        assert pages.tolist() == known and handle.num_pages == len(known)
        if lock:
            self.tree.lock(handle)
            self.locked.append((handle, self._prefixes(namespace, tokens)[: len(known)]))

    @rule(namespace=NAMESPACES, tokens=TOKENS, lock=st.booleans())
    def insert(self, namespace, tokens, lock):
        prefixes, known = self._prefixes(namespace, tokens), self._known(namespace, tokens)
        mine = list(range(self.next_page, self.next_page + len(prefixes)))
        self.next_page += len(prefixes)
        done = self.tree.insert(namespace, _ids(*tokens), np.array([*mine, -7], np.int32))
        assert done.known.tolist() == known
        assert done.taken.tolist() == mine[len(known) :]
        assert done.handle.num_pages == len(prefixes)
        self.pages |= dict(zip(prefixes[len(known) :], mine[len(known) :], strict=True))
        if lock:
            self.tree.lock(done.handle)
            self.locked.append((done.handle, prefixes))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data):
        handle, _ = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.tree.unlock(handle)

    @rule(num=st.integers(0, 12))
    def evict(self, num):
        pinned = {self.pages[prefix] for _, prefixes in self.locked for prefix in prefixes}
        evictable = len(self.pages) - len(pinned)
        assert self.tree.num_evictable == evictable
        gone = self.tree.evict(num).tolist()
        assert len(gone) == min(num, evictable) and len(set(gone)) == len(gone) and not set(gone) & pinned
        self.pages = {prefix: page for prefix, page in self.pages.items() if page not in gone}
        for prefix in self.pages:
            assert len(prefix) - 1 == self.size or prefix[: -self.size] in self.pages, "a hole in a prefix"

    @invariant()
    def agrees(self):
        self.tree.check()
        assert self.tree.num_pages == len(self.pages)


TestTreeModel = TreeModel.TestCase
TestTreeModel.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 5))
def test_what_was_inserted_is_matched_up_to_its_last_full_page(tokens, page_size):
    tree = RadixTree(page_size)
    full = len(tokens) // page_size
    tree.insert("", _ids(*tokens), np.arange(full, dtype=np.int32))
    assert tree.match("", _ids(*tokens, 9))[1].tolist() == list(range(full))


def test_least_recently_matched_goes_first_and_from_its_end():
    tree = RadixTree(1)
    tree.insert("", _ids(1, 2, 3), _ids(10, 11, 12))
    tree.insert("", _ids(4, 5, 6), _ids(20, 21, 22))
    tree.match("", _ids(1, 2, 3))
    assert tree.evict(2).tolist() == [21, 22]
    assert tree.match("", _ids(4, 5, 6))[1].tolist() == [20]
    assert sorted(tree.evict(3).tolist()) == [10, 11, 12], "20 was matched last"


def test_handles_stay_good_when_their_node_is_split():
    tree = RadixTree(1)
    handle = tree.insert("", _ids(1, 2, 3, 4), _ids(10, 11, 12, 13)).handle
    tree.lock(handle)
    tree.insert("", _ids(1, 2, 9), _ids(0, 0, 30))
    assert handle.num_pages == 4
    assert tree.evict(10).tolist() == [30]
    tree.unlock(handle)
    tree.check()
    assert sorted(tree.evict(10).tolist()) == [10, 11, 12, 13]


def test_unlocking_too_often_is_found():
    tree = RadixTree(1)
    handle = tree.insert("", _ids(1), _ids(0)).handle
    with pytest.raises(AssertionError, match="more often"):
        tree.unlock(handle)


def test_namespaces_that_hold_nothing_leave_nothing_behind():
    tree = RadixTree(2)
    for i in range(100):
        tree.match(f"salt {i}", _ids(1, 2, 3))
        tree.insert(f"salt {i}", _ids(1), _ids())
        tree.insert(f"other {i}", _ids(1, 2), _ids(i))
    tree.evict(100)
    assert not tree._roots


def test_heap_of_leaves_stays_as_small_as_the_tree():
    tree = RadixTree(1)
    tree.insert("", _ids(1, 2), _ids(0, 1))
    for _ in range(5000):
        handle, _ = tree.match("", _ids(1, 2))
        tree.lock(handle)
        tree.unlock(handle)
    assert len(tree._leaves) < 100


def test_naive_cache_takes_and_gives_nothing():
    cache = NaiveCache()
    done = cache.insert("", _ids(1, 2), _ids(5, 6))
    assert len(done.known) == len(done.taken) == done.handle.num_pages == 0
    handle, pages = cache.match("", _ids(1, 2))
    cache.lock(handle)
    cache.unlock(handle)
    cache.check()
    assert len(pages) == len(cache.evict(5)) == cache.num_pages == cache.num_evictable == 0
