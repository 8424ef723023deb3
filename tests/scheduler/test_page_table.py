import numpy as np
import pytest

from services.scheduler.core.page_pool import CACHED, LIVE, QUARANTINED, PageFault
from services.scheduler.core.page_table import PageTable
from services.scheduler.core.prefix_cache import NaiveCache
from services.scheduler.core.radix_tree import RadixTree
from tests.scheduler.driver import limits

PROMPT = np.arange(10, dtype=np.int32)


def _table(num_pages: int = 16, naive: bool = False) -> PageTable:
    return PageTable(limits(num_pages=num_pages), NaiveCache() if naive else RadixTree(4))


def _open(table: PageTable, slot: int, tokens: np.ndarray = PROMPT) -> None:
    table.open(slot, *table.pin("", tokens[:-1]), len(tokens))


def test_a_slot_gets_pages_for_its_tokens_and_gives_them_back():
    table = _table()
    _open(table, 2)
    assert table.num_pages[2] == 3 and table.num_available == 13
    assert table.rows(np.array([2]), 10).tolist() == [[0, 1, 2]]
    table.check()
    table.close(2, last_step=4, settled_step=4)
    table.check()
    assert table.num_available == 16 and not table.pages[2].any()


def test_a_page_is_missing_only_at_its_first_token():
    table = _table()
    _open(table, 0)
    _open(table, 1, PROMPT[:8])
    slots = np.array([0, 1], np.int32)
    assert table.missing(slots, np.array([10, 8])).tolist() == [1]
    assert table.missing(slots, np.array([11, 7])).tolist() == []
    assert table.missing(slots, np.array([12, 8])).tolist() == [0, 1]
    table.grow(slots)
    assert table.num_pages[:2].tolist() == [4, 3] and len(set(table.pages[:2].ravel().tolist()) - {0}) == 6
    table.check()


def test_shared_pages_are_used_by_the_next_with_the_same_prefix():
    table = _table()
    _open(table, 0)
    table.share(0, "", PROMPT, 0, 0)
    _open(table, 1)
    assert table.pages[1, :2].tolist() == table.pages[0, :2].tolist() and table.pages[1, 2] != table.pages[0, 2]
    table.check()
    table.close(0, 0, 0)
    assert table.cache.num_evictable == 0, "the other one has them pinned"
    table.close(1, 0, 0)
    table.check()
    assert table.cache.num_evictable == 2 and table.num_available == 16


def test_duplicates_are_swapped_and_held_back_while_a_step_refers_to_them():
    table = _table()
    _open(table, 0)
    _open(table, 1)
    duplicates = table.pages[1, :2].tolist()
    table.share(0, "", PROMPT, 0, 0)
    table.share(1, "", PROMPT, last_step=7, settled_step=6)
    assert table.pages[1, :2].tolist() == table.pages[0, :2].tolist()
    assert table.pool.states(np.array(duplicates)).tolist() == [QUARANTINED] * 2
    table.check()
    table.retire(6)
    assert table.pool.num_quarantined == 2
    table.retire(7)
    assert table.pool.num_quarantined == 0
    table.check()


def test_closing_in_flight_holds_pages_and_pin_until_the_step_has_retired():
    table = _table()
    _open(table, 0)
    table.share(0, "", PROMPT, 3, 3)
    own = table.pages[0, 2]
    table.close(0, last_step=5, settled_step=4)
    assert table.pool.states(np.array([own])).tolist() == [QUARANTINED] and table.cache.num_evictable == 0
    table.check()
    table.retire(4)
    assert table.cache.num_evictable == 0
    table.retire(5)
    assert table.cache.num_evictable == 2 and table.num_available == 16
    table.check()


def test_what_is_cached_makes_room_when_pages_run_out():
    table = _table(num_pages=4)
    _open(table, 0)
    table.share(0, "", PROMPT, 0, 0)
    table.close(0, 0, 0)
    assert table.pool.count(CACHED) == 2 and table.num_available == 4
    _open(table, 1, np.arange(100, 115, dtype=np.int32))
    assert table.num_evicted == 2 and table.pool.count(LIVE) == 4 and table.num_available == 0
    with pytest.raises(PageFault):
        table.grow(np.array([1]))


def test_a_pin_protects_before_the_slot_is_opened():
    table = _table(num_pages=4)
    _open(table, 0)
    table.share(0, "", PROMPT, 0, 0)
    table.close(0, 0, 0)
    handle, pages = table.pin("", PROMPT[:-1])
    assert len(pages) == 2 and table.num_available == 2
    table.unpin(handle)
    assert table.num_available == 4


def test_nothing_is_shared_without_a_cache():
    table = _table(naive=True)
    _open(table, 0)
    table.share(0, "", PROMPT, 0, 0)
    _open(table, 1)
    assert not set(table.pages[0, :3].tolist()) & set(table.pages[1, :3].tolist())
    table.check()
    table.close(0, 0, 0)
    table.close(1, 0, 0)
    assert table.pool.num_free == 16


def test_check_finds_a_page_that_two_slots_own():
    table = _table()
    _open(table, 0)
    _open(table, 1)
    table.pages[1, 0] = table.pages[0, 0]
    with pytest.raises(AssertionError, match="live pages"):
        table.check()
