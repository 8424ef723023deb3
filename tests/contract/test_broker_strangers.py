"""A key of ours that holds what somebody else put there: it is put aside, and what was asked happens all the same."""

import pytest

from shared.broker.connection import AsyncBroker, Broker
from shared.broker.log_id import NO_LOG
from shared.broker.replies import last_id, read_inbox
from shared.errors import BrokerError
from shared.ids import new_uid
from shared.keys import Keys
from tests.contract.broker_driver import REPLICA, Driver
from tests.redis_keys import command

pytestmark = pytest.mark.every_redis


@pytest.fixture
def driver(broker: Broker) -> Driver:
    return Driver(broker)


def vandalize(driver: Driver, key: str) -> None:
    driver.redis("SET", key, "mine")


def check_aside(driver: Driver, key: str) -> None:
    """It is kept for a while under another name, and was told once."""
    assert driver.redis("GET", driver.keys.aside(key)) == b"mine"
    assert driver.ttl_ms(driver.keys.aside(key)) > 0
    assert driver.broker.num_strange == 1


def test_a_log_that_is_none_counts_as_gone(driver: Driver) -> None:
    entry = driver.queued()
    key = driver.keys.reply(entry.uid)
    vandalize(driver, key)
    assert driver.fence(entry).outcome == "GONE"
    check_aside(driver, key)


def test_one_log_that_is_none_spoils_no_other(driver: Driver) -> None:
    entries = [driver.queued() for _ in range(2)]
    attempts = [driver.fence(entry).attempt for entry in entries]
    prevs = [driver.last(entry.uid) for entry in entries]
    vandalize(driver, driver.keys.reply(entries[0].uid))
    said = driver.append(*map(driver.item, entries, prevs, attempts, [[7], [7]]))
    assert said[0] == NO_LOG
    assert driver.last(entries[1].uid) == said[1] != NO_LOG
    check_aside(driver, driver.keys.reply(entries[0].uid))


def test_a_request_is_moved_whole_over_strange_keys(driver: Driver) -> None:
    """Nothing is deleted from the queue before it is known that the engine's stream will take it."""
    uids = [new_uid(), new_uid()]
    driver.open(*uids)
    vandalize(driver, driver.keys.reply(uids[0]))
    driver.redis("SET", driver.keys.generate("A"), "mine")
    assert driver.run(driver.move_call(driver.read_one())) == "OK"
    assert [entry.uid for entry in driver.entries()] == [uids[1]]
    assert driver.broker.num_strange == 2


def test_an_entry_is_taken_over_into_a_strange_stream(driver: Driver) -> None:
    entry = driver.queued()
    vandalize(driver, driver.keys.generate("B"))
    assert driver.take(entry) == "OK"
    assert [e.uid for e in driver.entries("B")] == [entry.uid]
    check_aside(driver, driver.keys.generate("B"))


def test_a_strange_queue_is_read_again_with_its_group(driver: Driver) -> None:
    driver.opened()
    key = next(k.decode() for k in driver.redis("KEYS", f"{driver.keys.prefix}:tokenize:*"))
    vandalize(driver, key)
    uid = driver.opened()
    assert driver.read_one().uids == [uid]
    check_aside(driver, key)


def test_a_strange_registry_is_made_anew(driver: Driver) -> None:
    key = driver.keys.alive("scheduler")
    vandalize(driver, key)
    assert set(driver.beat("A")["scheduler"]) == {"A"}
    check_aside(driver, key)


def test_a_strange_inbox_hinders_no_log_and_is_made_anew_by_its_reader(driver: Driver) -> None:
    entry = driver.queued()
    driver.fence(entry)
    key = driver.keys.inbox(REPLICA)
    vandalize(driver, key)
    said = driver.say(entry, [7])
    assert driver.last(entry.uid) == said
    assert driver.end(entry.uid) == "OK"
    assert driver.rings() == []
    check_aside(driver, key)
    other = driver.queued()
    driver.fence(other)
    driver.say(other, [7])
    assert [ring.uid for ring in driver.rings()] == [other.uid]


def test_keys_of_others_are_left_alone(driver: Driver) -> None:
    key = f"{driver.keys.prefix}:other:x"
    vandalize(driver, key)
    with pytest.raises(BrokerError, match="WRONGTYPE"):
        driver.run(command("XLEN", key))
    assert driver.redis("GET", key) == b"mine"
    assert Keys("p").kind_of("q:reply:x") is None
    assert Keys("p").kind_of("p:strange:reply:x") is None
    assert Keys("p").kind_of("p:reply:x") == "stream"


@pytest.mark.anyio
async def test_the_same_on_an_event_loop(driver: Driver, async_broker: AsyncBroker) -> None:
    keys = async_broker.keys
    for key in (keys.reply("x"), keys.inbox("y")):
        driver.redis("SET", key, "mine")
    assert await async_broker.run(last_id(keys, "x")) == NO_LOG
    assert (await async_broker.run(read_inbox(keys, "y", block_ms=0))).rings == []
    assert async_broker.num_strange == 2
