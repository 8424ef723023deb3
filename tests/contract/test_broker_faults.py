"""Faults of the server: lost answers, full memory, read-only, forgotten scripts, restarts with and without data."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from services.launcher.redis_server import RedisServer
from shared.broker import control, dead_letters, replies, streams
from shared.broker.append import append as append_items
from shared.broker.call import Call
from shared.broker.connection import AsyncBroker, Broker
from shared.broker.log_id import is_end
from shared.errors import BrokerDown, BrokerError, BrokerFull
from shared.ids import new_uid
from shared.messages import DeadLetter, StepChunk
from shared.settings import RedisSettings
from tests.conftest import StartRedis
from tests.contract.broker_driver import MODEL, Driver
from tests.redis_keys import command
from tests.waiting import eventually

pytestmark = pytest.mark.every_redis


def settings_of(server: RedisServer) -> RedisSettings:
    return RedisSettings(redis_url=server.url, redis_prefix="private")


@pytest.fixture
def driver(broker: Broker) -> Driver:
    return Driver(broker)


# --- lost answers: each script twice in a row leaves the same state ---


def open_one(driver: Driver) -> Call[Any]:
    return driver.open_call(new_uid())


def reopen(driver: Driver) -> Call[Any]:
    entry = driver.queued()
    return driver.open_call(entry.uid, expect=driver.last(entry.uid), cap=None)


def move(driver: Driver) -> Call[Any]:
    driver.opened()
    return driver.move_call(driver.read_one())


def take(driver: Driver) -> Call[Any]:
    return driver.take_call(driver.queued())


def take_ended(driver: Driver) -> Call[Any]:
    entry = driver.queued()
    driver.end(entry.uid)
    return driver.take_call(entry)


def fence(driver: Driver) -> Call[Any]:
    return driver.fence_call(driver.queued(), nonce="once")


def fence_ended(driver: Driver) -> Call[Any]:
    entry = driver.queued()
    driver.end(entry.uid)
    return driver.fence_call(entry, nonce="once")


def append(driver: Driver) -> Call[Any]:
    items = []
    for finish in (None, "stop"):
        entry = driver.queued()
        attempt = driver.fence(entry).attempt
        items.append(driver.item(entry, driver.last(entry.uid), attempt, [1, 2], finish=finish))
    return append_items(driver.keys, items)


def end(driver: Driver) -> Call[Any]:
    entry = driver.queued()
    driver.fence(entry)
    return driver.end_call(entry.uid)


def audit(driver: Driver) -> Call[Any]:
    return replies.audit(driver.keys, [driver.queued().uid, "gone"])


def sweep(driver: Driver) -> Call[Any]:
    return replies.sweep(driver.keys, [driver.queued().uid, "gone"])


def retire(driver: Driver) -> Call[Any]:
    return control.retire(driver.keys, "scheduler", "B", driver.run(control.look(driver.keys, "scheduler"))["B"])


def pronounce(driver: Driver) -> Call[Any]:
    return control.pronounce(driver.keys, "scheduler", "B", driver.run(control.look(driver.keys, "scheduler"))["B"])


def discard(driver: Driver) -> Call[Any]:
    driver.opened()
    return streams.discard(driver.keys, MODEL, driver.read_one().entry_id)


def claim(driver: Driver) -> Call[Any]:
    driver.opened()
    driver.read_one("dead")
    return streams.claim_one(driver.keys, MODEL, "dead", "t2")


def forget(driver: Driver) -> Call[Any]:
    driver.opened()
    driver.run(driver.move_call(driver.read_one("dead")))
    return streams.forget_consumer(driver.keys, MODEL, "dead")


ALL = [open_one, reopen, move, take, take_ended, fence, fence_ended, append, end]
ALL += [audit, sweep, retire, pronounce, discard, claim, forget]


@pytest.mark.parametrize("prepare", ALL)
def test_a_lost_answer_changes_nothing(driver: Driver, prepare: Callable[[Driver], Call[Any]]) -> None:
    call = prepare(driver)
    driver.run(call)
    state = driver.state()
    driver.run(call)
    assert driver.state() == state


@pytest.mark.parametrize("prepare", [fence, append])
def test_the_second_answer_is_the_first(driver: Driver, prepare: Callable[[Driver], Call[Any]]) -> None:
    call = prepare(driver)
    assert driver.run(call) == driver.run(call)


# --- full memory ---


@pytest.fixture
def own(start_redis: StartRedis) -> RedisServer:
    """A server that the test may fill, stop and wipe."""
    return start_redis()


def fill(driver: Driver) -> None:
    driver.redis("CONFIG", "SET", "maxmemory", "1")


def empty(driver: Driver) -> None:
    driver.redis("CONFIG", "SET", "maxmemory", "0")


REFUSED = [open_one, reopen, fence]
PASSING = [move, take, append, end, audit, sweep, retire, discard, claim]


@pytest.mark.parametrize("prepare", REFUSED)
def test_a_full_memory_refuses_new_work_whole(own: RedisServer, prepare: Callable[[Driver], Call[Any]]) -> None:
    with Broker(settings_of(own)) as broker:
        driver = Driver(broker)
        call = prepare(driver)
        state = driver.state()
        fill(driver)
        with pytest.raises(BrokerFull, match=r"OOM|maxmemory"):
            driver.run(call)
        assert driver.state() == state
        empty(driver)
        assert driver.run(call)[0] == "OK"


@pytest.mark.parametrize("prepare", PASSING)
def test_a_full_memory_lets_pass_what_empties_it(own: RedisServer, prepare: Callable[[Driver], Call[Any]]) -> None:
    with Broker(settings_of(own)) as broker:
        driver = Driver(broker)
        call, same = prepare(driver), prepare(driver)
        without = driver.run(same)
        fill(driver)
        answer = driver.run(call)
        empty(driver)
        assert type(answer) is type(without)
        if isinstance(answer, str):
            assert answer == without == "OK"


def test_a_full_memory_refuses_tokens_but_not_those_who_empty_it(own: RedisServer) -> None:
    with Broker(settings_of(own)) as broker:
        driver = Driver(broker)
        fill(driver)
        chunk = StepChunk("A", 0, ["u"], [1], [1], [5])
        with pytest.raises(BrokerFull):
            driver.run(streams.publish_tokens(driver.keys, MODEL, 0, chunk))
        assert set(driver.beat("C")["scheduler"]) == {"A", "B", "C"}, "instances beat, and may even start"
        broker.prepare()
        assert driver.run(streams.length(driver.keys.tokens(MODEL, 0))) == 0


def test_a_flush_under_full_memory_ends_and_says_everything(own: RedisServer) -> None:
    with Broker(settings_of(own)) as broker:
        driver = Driver(broker)
        call = append(driver)
        fill(driver)
        answers = driver.run(call)
        empty(driver)
        assert [is_end(answer) for answer in answers] == [False, True]
        assert len(driver.rings()) == 2


# --- read-only: a demoted master ---


@pytest.mark.parametrize("prepare", [open_one, move, take, fence, append, end, audit, retire, discard, claim])
def test_a_read_only_server_does_nothing_by_half(own: RedisServer, prepare: Callable[[Driver], Call[Any]]) -> None:
    with Broker(settings_of(own)) as broker:
        driver = Driver(broker)
        call = prepare(driver)
        state = driver.state()
        driver.redis("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(BrokerDown, match=r"(?i)read.?only"):
            driver.run(call)
        assert driver.state() == state
        driver.redis("REPLICAOF", "NO", "ONE")
        driver.run(call)


def test_a_look_does_not_count_on_a_read_only_server(own: RedisServer) -> None:
    with Broker(settings_of(own)) as broker:
        driver = Driver(broker)
        driver.redis("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(BrokerDown):
            driver.beat("A", 2)


# --- forgotten scripts ---


def test_forgotten_scripts_are_loaded_again_in_a_pipeline(driver: Driver) -> None:
    uid, other = new_uid(), new_uid()
    driver.redis("SCRIPT", "FLUSH")
    opened, last, again = driver.broker.run_many(
        [driver.open_call(uid), replies.last_id(driver.keys, uid), driver.open_call(other)]
    )
    assert opened.outcome == again.outcome == "OK"
    assert last == opened.log_ids[0], "what stands behind a forgotten script sees what the script did"


def test_a_read_of_the_group_in_such_a_pipeline_is_not_made_twice(driver: Driver) -> None:
    uids = [driver.opened(), driver.opened()]
    driver.redis("SCRIPT", "FLUSH")
    read = streams.read_queue(driver.keys, MODEL, "t1", count=1)
    _, first, second = driver.broker.run_many([driver.open_call(new_uid()), read, read])
    assert [first[0].uids, second[0].uids] == [[uids[0]], [uids[1]]]


def test_script_and_group_forgotten_together(own: RedisServer) -> None:
    with Broker(settings_of(own)) as broker:
        keys = broker.keys
        answers = broker.run_many(
            [streams.claim_one(keys, MODEL, "dead", "t1"), streams.read_queue(keys, MODEL, "t1", count=1)]
        )
    assert answers == [None, []]


# --- the first error counts, the server's words do not leak arguments ---


def test_a_wrong_command_is_no_outage_and_does_not_show_its_arguments(broker: Broker) -> None:
    with pytest.raises(BrokerError) as caught:
        broker.run(command("NOSUCHCOMMAND", "secret words"))
    assert not isinstance(caught.value, BrokerDown)
    assert "secret" not in str(caught.value)


def test_one_failing_call_fails_the_list_and_the_connection_stays_in_step(driver: Driver) -> None:
    with pytest.raises(BrokerError, match="unknown command"):
        driver.broker.run_many([command("PING"), command("NOSUCHCOMMAND"), command("PING")])
    assert driver.redis("ECHO", "next") == b"next"


# --- restarts ---


def test_a_killed_server_is_told_once_then_found_again(start_redis: StartRedis) -> None:
    server = start_redis(persistent=True)
    with Broker(settings_of(server)) as broker:
        driver = Driver(broker)
        uid = driver.opened()
        eventually(lambda: b"aof_pending_bio_fsync:0" in bytes(driver.redis("INFO")), "the append-only file is written")
        server.stop()
        for _ in range(2):
            with pytest.raises(BrokerDown):
                driver.last(uid)
        server.start()
        assert driver.last(uid), "the data is back, and the same thread connects by itself"


def test_a_restart_between_two_calls_is_noticed(own: RedisServer) -> None:
    with Broker(settings_of(own)) as broker:
        driver = Driver(broker)
        uid = driver.opened()
        own.kill()
        own.start()
        with pytest.raises(BrokerDown):
            driver.last(uid)
        assert driver.last(uid) == b"", "this one keeps nothing"
        assert driver.open(new_uid()).outcome == "OK"


def test_a_reader_that_waits_while_the_server_dies_is_told(own: RedisServer) -> None:
    with Broker(settings_of(own)) as broker:
        driver = Driver(broker)
        driver.beat("A")
        outcome: list[BaseException] = []
        started = threading.Event()

        def read() -> None:
            try:
                while True:
                    started.set()
                    broker.run(streams.read_queue(broker.keys, MODEL, "t1", count=1, block_ms=1000))
            except BrokerDown as e:
                outcome.append(e)

        reader = threading.Thread(target=read)
        reader.start()
        started.wait(5)
        eventually(lambda: b"cmd=xreadgroup" in bytes(driver.redis("CLIENT", "LIST")), "the reader waits")
        own.kill()
        reader.join(10)
        assert len(outcome) == 1


def test_a_wipe_under_a_waiting_reader_makes_the_group_again(own: RedisServer) -> None:
    with Broker(settings_of(own)) as broker:
        driver = Driver(broker)
        got: list[list[streams.QueueEntry]] = []

        def read() -> None:
            while not got or not got[-1]:
                got.append(broker.run(streams.read_queue(broker.keys, MODEL, "t1", count=1, block_ms=1000)))

        reader = threading.Thread(target=read)
        reader.start()
        eventually(lambda: b"cmd=xreadgroup" in bytes(driver.redis("CLIENT", "LIST")), "the reader waits")
        driver.redis("FLUSHALL")  # a server of this test alone
        driver.beat("A")
        uid = driver.opened()
        reader.join(10)
        assert got[-1][0].uids == [uid]


@pytest.mark.anyio
async def test_the_event_loop_is_told_once_per_outage(own: RedisServer) -> None:
    broker = AsyncBroker(settings_of(own))
    for _ in range(3):
        await broker.run(command("PING"))
    own.kill()
    with pytest.raises(BrokerDown):
        await broker.run(command("PING"))
    own.start()
    assert await broker.run(command("PING")) == b"PONG"
    await broker.close()


def test_a_dead_letter_survives_a_kill_when_persistent(start_redis: StartRedis) -> None:
    server = start_redis(persistent=True, extra={"appendfsync": "always"})
    with Broker(settings_of(server)) as broker:
        broker.run(dead_letters.bury(broker.keys, DeadLetter("u", "poison", 3, "scheduler", 0)))
        server.kill()
        server.start()
        with pytest.raises(BrokerDown):
            broker.run(dead_letters.list_dead(broker.keys))
        assert [letter.uid for _, letter in broker.run(dead_letters.list_dead(broker.keys))] == ["u"]
