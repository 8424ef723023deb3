"""Streams that a client may come back to, in the broker: kept, come back to, put off, ended when they are due."""

from typing import Any

import pytest

from shared.broker import replies, resumable
from shared.broker.connection import Broker
from shared.broker.resumable import Attached, Lapsed, Record
from shared.errors import BrokerFull
from shared.messages import Delta, ErrorBody
from shared.settings import RedisSettings
from tests.conftest import StartRedis
from tests.contract.broker_driver import Driver
from tests.redis_keys import command, find_keys
from tests.waiting import eventually

pytestmark = pytest.mark.every_redis
LATE = Delta(0, [], "", error=ErrorBody(504, "late", "timeout_error"))
LIFE_MS = 60_000


@pytest.fixture
def driver(broker: Broker) -> Driver:
    return Driver(broker)


def record(*uids: str, **more: Any) -> Record:
    return Record(uids, "hash", more.pop("life_ms", LIFE_MS), b"data", **more)


def opened(driver: Driver, num: int = 1, **more: Any) -> list[str]:
    uids = [driver.opened(resumable_ms=LIFE_MS) for _ in range(num)]
    assert driver.run(resumable.keep(driver.keys, record(*uids, **more))) == "OK"
    return uids


def due(driver: Driver, uid: str) -> float:
    """Say in how many ms a stream lapses."""
    score = driver.redis("ZSCORE", driver.keys.streams, uid)
    seconds, microseconds = driver.redis("TIME")
    return float(score) - int(seconds) * 1000 - int(microseconds) / 1000


def is_over(driver: Driver, uid: str) -> bool:
    return driver.redis("ZSCORE", driver.keys.streams, uid) is None


def attach(driver: Driver, uid: str, key_hash: str = "hash") -> Attached | None:
    return driver.run(resumable.attach(driver.keys, uid, key_hash))


def overdue(driver: Driver, uid: str) -> None:
    driver.redis("ZADD", driver.keys.streams, 1, uid)


def test_a_stream_is_kept_and_come_back_to(driver: Driver) -> None:
    first, _ = opened(driver, 2)
    assert attach(driver, first) == Attached(b"data", None)
    assert attach(driver, first, "other") is None
    assert attach(driver, "nobody") is None
    assert LIFE_MS - 5000 < due(driver, first) <= LIFE_MS
    assert driver.ttl_ms(driver.keys.stream(first)) > LIFE_MS
    assert driver.ttl_ms(driver.keys.streams) > LIFE_MS


def test_coming_back_puts_off_the_lapse_but_not_for_a_stranger(driver: Driver) -> None:
    (uid,) = opened(driver)
    overdue(driver, uid)
    attach(driver, uid, "other")
    assert due(driver, uid) < 0
    attach(driver, uid)
    assert due(driver, uid) > LIFE_MS - 5000
    overdue(driver, uid)
    assert driver.run(resumable.put_off(driver.keys, uid, LIFE_MS)) == "OK"
    assert due(driver, uid) > LIFE_MS - 5000
    assert driver.run(resumable.put_off(driver.keys, "nobody", LIFE_MS)) == "UNKNOWN"
    assert driver.redis("ZCARD", driver.keys.streams) == 1


def test_a_stream_without_one_of_its_logs_is_gone(driver: Driver) -> None:
    first, second = opened(driver, 2)
    driver.run(replies.delete_logs(driver.keys, [second]))
    assert attach(driver, first) is None


def test_what_nobody_came_back_to_is_removed(driver: Driver) -> None:
    first, second = opened(driver, 2)
    (other,) = opened(driver)
    overdue(driver, first)
    assert driver.run(resumable.lapse(driver.keys, LATE)) == Lapsed(1, 0)
    assert [driver.last(uid) for uid in (first, second)] == [b"", b""]
    assert [driver.redis("EXISTS", driver.keys.abort(uid)) for uid in (first, second)] == [1, 1]
    assert driver.redis("EXISTS", driver.keys.stream(first)) == 0
    assert is_over(driver, first)
    assert attach(driver, other), "what is not due stays"
    assert driver.run(resumable.lapse(driver.keys, LATE)) == Lapsed(0, 0)


def test_what_has_ended_lives_out_its_time(driver: Driver) -> None:
    (uid,) = opened(driver)
    driver.end(uid)
    overdue(driver, uid)
    assert driver.run(resumable.lapse(driver.keys, LATE)) == Lapsed(0, 0)
    assert is_over(driver, uid)
    assert attach(driver, uid) == Attached(b"data", None)
    assert is_over(driver, uid), "a reader of what has ended does not bring it back"
    assert driver.ttl_ms(driver.keys.stream(uid)) <= LIFE_MS


def test_a_deadline_ends_a_stream_with_its_error(driver: Driver) -> None:
    first, second = opened(driver, 2, timeout_ms=1)
    driver.end(second)
    rung = len(driver.rings())
    eventually(lambda: driver.run(resumable.lapse(driver.keys, LATE)) == Lapsed(0, 1), "the deadline has passed")
    (*_, final) = driver.log(first)
    assert isinstance(final, replies.EndEntry)
    assert final.delta == LATE
    assert len(driver.rings()) == rung + 1, "its replica hears of it; of what had ended it does not"
    assert attach(driver, first) == Attached(b"data", 0)


def test_a_deadline_is_never_put_off(driver: Driver) -> None:
    (uid,) = opened(driver, timeout_ms=30_000)
    driver.run(resumable.put_off(driver.keys, uid, LIFE_MS))
    assert 20_000 < due(driver, uid) <= 30_000
    attached = attach(driver, uid)
    assert attached is not None
    assert attached.timeout_ms is not None and 20_000 < attached.timeout_ms <= 30_000


def test_streams_are_counted_until_they_are_told(driver: Driver) -> None:
    (uid,) = opened(driver)
    call = resumable.keep(driver.keys, record("u2"), cap=1)
    assert driver.run(call) == "FULL"
    assert driver.redis("EXISTS", driver.keys.stream("u2")) == 0
    assert driver.run(resumable.keep(driver.keys, record(uid), cap=1)) == "OK", "kept already"
    driver.end(uid)
    for _ in range(2):
        driver.run(resumable.complete(driver.keys, uid, LIFE_MS))
    assert driver.ttl_ms(driver.keys.stream(uid)) <= LIFE_MS
    assert driver.run(call) == "OK"
    for forget in resumable.discard(driver.keys, "u2"):
        driver.run(forget)
    assert driver.redis("EXISTS", driver.keys.stream("u2"), driver.keys.streams) == 0


def test_lost_answers_change_nothing(driver: Driver) -> None:
    (uid,) = opened(driver)
    driver.end(uid)
    calls = [resumable.keep(driver.keys, record(uid)), resumable.complete(driver.keys, uid, LIFE_MS)]
    for call in (*calls, resumable.lapse(driver.keys, LATE)):
        driver.run(call)
        before = [driver.redis("HGETALL", driver.keys.stream(uid)), is_over(driver, uid)]
        driver.run(call)
        assert [driver.redis("HGETALL", driver.keys.stream(uid)), is_over(driver, uid)] == before


def test_sweeps_of_several_do_not_take_each_others_signs(driver: Driver) -> None:
    entry = driver.queued(resumable_ms=LIFE_MS)
    last = driver.last(entry.uid)
    driver.run(replies.audit(driver.keys, [entry.uid]))
    for _ in range(2):
        assert driver.run(replies.sweep(driver.keys, [entry.uid], several=True)) == [(last, True)]


def test_a_full_memory_refuses_new_streams_and_ends_old_ones(start_redis: StartRedis) -> None:
    with Broker(RedisSettings(redis_url=start_redis().url, redis_prefix="full")) as broker:
        driver = Driver(broker)
        (uid,), (late,) = opened(driver), opened(driver, timeout_ms=1)
        overdue(driver, uid)
        driver.redis("CONFIG", "SET", "maxmemory", "1")
        before = find_keys(broker)
        with pytest.raises(BrokerFull):
            driver.run(resumable.keep(driver.keys, record("new")))
        assert find_keys(broker) == before
        assert driver.run(resumable.put_off(driver.keys, late, LIFE_MS)) == "OK"
        assert attach(driver, late)
        assert driver.run(resumable.lapse(driver.keys, LATE)) == Lapsed(1, 1)
        broker.run(command("CONFIG", "SET", "maxmemory", "0"))
