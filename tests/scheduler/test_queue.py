import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.queue import MAX_IDLE_ACCOUNTS, WaitingQueue


def _drain(queue: WaitingQueue) -> list:
    return [queue.pop() for _ in range(len(queue))]


def test_arrival_decides_within_a_tenant_and_push_between_equals():
    queue = WaitingQueue()
    for uid, at in (("late", 9), ("early", 1), ("first", 5), ("second", 5)):
        queue.push(uid, uid, arrival_ms=at)
    assert _drain(queue) == ["early", "first", "second", "late"]


def test_lower_priority_number_goes_first_whoever_pays():
    queue = WaitingQueue()
    queue.push("a", "a", priority=1, tenant="x", arrival_ms=0)
    queue.push("b", "b", priority=-1, tenant="y", arrival_ms=9)
    queue.push("c", "c", priority=0, tenant="x", arrival_ms=5)
    assert _drain(queue) == ["b", "c", "a"]


def test_flood_of_one_tenant_delays_only_itself():
    queue = WaitingQueue()
    for i in range(100):
        queue.push(f"flood {i}", "flood", tenant="flood", arrival_ms=i)
    for _ in range(10):
        queue.pop()
    queue.push("one", "one", tenant="small", arrival_ms=1000)
    assert queue.pop() == "one"


def test_tenants_share_by_cost_and_not_by_count():
    queue = WaitingQueue()
    for i in range(400):
        queue.push(f"big {i}", "big", tenant="big", cost=30)
        queue.push(f"small {i}", "small", tenant="small", cost=10)
    taken = [queue.pop() for _ in range(200)]
    assert 48 <= taken.count("big") <= 52


def test_silence_earns_no_credit():
    queue = WaitingQueue()
    queue.push("old", "b", tenant="b")
    for i in range(50):
        queue.push(f"a{i}", "a", tenant="a")
    for _ in range(41):
        queue.pop()
    for i in range(50):
        queue.push(f"b{i}", "b", tenant="b")
    taken = [queue.pop() for _ in range(10)]
    assert 4 <= taken.count("b") <= 6


def test_what_is_removed_is_not_popped():
    queue = WaitingQueue()
    with pytest.raises(IndexError):
        queue.pop()
    queue.push("a", 1)
    queue.push("b", 2, priority=-1)
    assert len(queue) == 2 and "b" in queue
    assert queue.remove("b") == 2 and queue.remove("b") is None and "b" not in queue
    assert queue.pop() == 1 and len(queue) == 0


def test_uid_pushed_again_is_replaced():
    queue = WaitingQueue()
    queue.push("a", "old", arrival_ms=1)
    queue.push("b", "b", arrival_ms=2)
    queue.push("a", "new", arrival_ms=3, priority=0)
    assert _drain(queue) == ["b", "new"]


def test_accounts_of_tenants_long_gone_are_dropped():
    queue = WaitingQueue()
    for i in range(3 * MAX_IDLE_ACCOUNTS):
        queue.push(f"stays {i}", "stays", tenant="stays", arrival_ms=i)
        queue.push("x", "x", tenant=f"t{i}")
        queue.pop()
        queue.pop()
        queue.push("stays", "stays", tenant="stays", arrival_ms=-1)
    assert len(queue._levels[0].accounts) <= MAX_IDLE_ACCOUNTS + 2
    _drain(queue)
    assert not queue._levels


@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "remove"]), st.integers(0, 12), st.integers(0, 2))))
def test_nothing_is_lost_or_doubled(moves):
    queue: WaitingQueue[int] = WaitingQueue()
    waiting: dict[str, int] = {}
    priority: dict[str, int] = {}
    for number, (move, who, level) in enumerate(moves):
        uid = f"u{who}"
        if move == "push":
            queue.push(uid, number, priority=level, tenant=f"t{who % 3}", arrival_ms=who)
            waiting[uid], priority[uid] = number, level
        elif move == "remove":
            assert queue.remove(uid) == waiting.pop(uid, None)
        elif waiting:
            taken = queue.pop()
            uid = next(u for u, n in waiting.items() if n == taken)
            assert priority[uid] == min(priority[u] for u in waiting)
            del waiting[uid]
        assert len(queue) == len(waiting) and all(uid in queue for uid in waiting)
    assert sorted(_drain(queue)) == sorted(waiting.values())
