"""The link under a broker that is away, forgets, is full, or loses its answers."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from services.launcher.redis_server import RedisServer
from shared.broker.connection import Broker
from shared.errors import BrokerDown
from shared.settings import RedisSettings
from tests.fakes.engines import HostedEngine
from tests.fakes.front import Front, Reply
from tests.redis_keys import command, delete_keys
from tests.waiting import eventually

StartRedis = Callable[..., RedisServer]


def at(server: RedisServer) -> RedisSettings:
    return RedisSettings(redis_url=server.url, redis_prefix="link")


def calm(front: Front, engine: HostedEngine, count: int, max_tokens: int) -> list[Reply]:
    return front.finish(*open_many(front, engine, count, max_tokens))


def open_many(front: Front, engine: HostedEngine, count: int, max_tokens: int) -> list[str]:
    return [front.open(engine.me, prompt_ids=[i, 4], max_tokens=max_tokens) for i in range(count)]


class Flaky:
    """A broker that fails now and then, before or after it has done what it was asked."""

    def __init__(self, broker: Broker, seed: int) -> None:
        self._broker = broker
        self._chance = random.Random(seed)
        self.failures = 0
        self.keys = broker.keys

    def run_many(self, calls: Any) -> Any:
        luck = self._chance.random()
        if luck < 0.05:
            self.failures += 1
            raise BrokerDown("not sent")
        answers = self._broker.run_many(calls)
        if luck < 0.15:
            self.failures += 1
            raise BrokerDown("the answer is lost")
        return answers

    def run(self, call: Any) -> Any:
        return self.run_many([call])[0]


@pytest.mark.parametrize("seed", range(3))
def test_lost_answers_lose_and_double_nothing(redis_settings: RedisSettings, broker: Broker, seed: int) -> None:
    front = Front(broker)
    with HostedEngine(redis_settings, "e1") as engine:
        expected = calm(front, engine, 20, 60)
        flaky = engine.link._broker = Flaky(engine.broker, seed)  # type: ignore[assignment]
        found = front.finish(*open_many(front, engine, 20, 60))
        assert flaky.failures  # type: ignore[attr-defined]
        engine.link._broker = engine.broker
        assert [reply.tokens for reply in found] == [reply.tokens for reply in expected]
        assert all(len(reply.attempts) == 1 for reply in found), "a fence asked for twice is one fence"
        eventually(lambda: engine.is_whole, "nothing is held")


def test_a_broker_that_was_away_longer_than_the_lease_finds_everything_as_it_was(start_redis: StartRedis) -> None:
    server = start_redis(persistent=True)
    with Broker(at(server)) as broker, HostedEngine(at(server), "e1") as engine:
        front = Front(broker)
        expected = calm(front, engine, 6, 2000)
        uids = open_many(front, engine, 6, 2000)
        front.until(lambda: front.said(*uids) > 3, "all are running")
        server.kill()
        eventually(lambda: engine.link.paused, "no steps without a lease")
        steps = engine.loop.stats.steps
        server.start()
        broker.close()
        eventually(lambda: not engine.link.paused, "it goes on")
        found = front.finish(*uids)
        assert engine.loop.stats.steps > steps
        assert [reply.tokens for reply in found] == [reply.tokens for reply in expected]
        eventually(lambda: engine.is_whole, "nothing is held")


def test_after_a_broker_that_forgot_everything_nothing_is_held(start_redis: StartRedis) -> None:
    server = start_redis()
    with Broker(at(server)) as broker, HostedEngine(at(server), "e1") as engine:
        front = Front(broker)
        uids = open_many(front, engine, 6, 4000)
        front.until(lambda: front.said(*uids) > 3, "all are running")
        server.kill()
        server.start()
        broker.close()
        eventually(lambda: engine.is_whole, "all is forgotten")
        assert front.last_ids(uids) == [b""] * 6, "nobody but an api opens a log"
        eventually(lambda: engine.me in front.beats(), "the engine is registered again")
        assert front.finish(front.open(engine.me))[0].finish == "length"


def test_keys_that_vanish_under_a_connection_that_lives(redis_settings: RedisSettings, broker: Broker) -> None:
    front = Front(broker)
    with HostedEngine(redis_settings, "e1") as engine:
        uids = open_many(front, engine, 6, 4000)
        front.until(lambda: front.said(*uids) > 3, "all are running")
        delete_keys(redis_settings)
        eventually(lambda: engine.is_whole, "all is forgotten")
        eventually(lambda: engine.me in front.beats(), "the engine is registered again")
        assert front.finish(front.open(engine.me))[0].finish == "length"


def test_a_full_broker_does_not_keep_aborts_from_being_seen(start_redis: StartRedis) -> None:
    server = start_redis()
    with Broker(at(server)) as broker, HostedEngine(at(server), "e1") as engine:
        front = Front(broker)
        uids = open_many(front, engine, 6, 4000)
        front.until(lambda: front.said(*uids) > 3, "all are running")
        broker.run(command("CONFIG", "SET", "maxmemory", "100kb"))
        for uid in uids[:3]:
            assert front.end(uid) == "OK"
        eventually(lambda: engine.link.load.num_running == 3, "the slots of the aborted are free")
        broker.run(command("CONFIG", "SET", "maxmemory", "0"))
        found = front.finish(*uids)
        assert [reply.finish for reply in found] == [None] * 3 + ["length"] * 3


def test_a_closed_connection_is_not_noticed_by_anybody(redis_settings: RedisSettings, broker: Broker) -> None:
    front = Front(broker)
    with HostedEngine(redis_settings, "e1") as engine:
        expected = calm(front, engine, 6, 300)
        uids = open_many(front, engine, 6, 300)
        front.until(lambda: front.said(*uids) > 3, "all are running")
        me = broker.run(command("CLIENT", "ID"))
        clients = broker.run(command("CLIENT", "LIST"))
        assert isinstance(clients, bytes)
        for line in clients.decode().splitlines():
            fields = dict(part.partition("=")[::2] for part in line.split())
            if int(fields["id"]) != me:
                broker.run(command("CLIENT", "KILL", "ID", fields["id"]))
        found = front.finish(*uids)
        assert [reply.tokens for reply in found] == [reply.tokens for reply in expected]
        assert all(len(reply.attempts) == 1 for reply in found)


def test_entries_below_the_position_are_found(redis_settings: RedisSettings, broker: Broker) -> None:
    """A server whose clock is behind the one before it makes ids below those that were read."""
    front = Front(broker)
    with HostedEngine(redis_settings, "e1"):
        stream = front.keys.generate("e1")
        front.broker.run(command("XADD", stream, "99999999999999-0", "x", "x"))
        eventually(lambda: not front.entries("e1"), "it is buried")
        front.broker.run(command("DEL", stream))
        assert front.finish(front.open("e1"))[0].finish == "length"
