import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from services.launcher.redis_server import RedisServer
from shared.broker.connection import Broker
from shared.broker.control import look, pronounce
from shared.errors import ConfigError, MillraceError
from shared.health import Pulse
from shared.heart import Heart
from shared.keys import Role
from shared.messages import Heartbeat, decode
from shared.metrics import Metrics
from shared.settings import RedisSettings
from tests.redis_keys import command
from tests.waiting import eventually

LEASES: dict[Role, float] = {"api": 0.3, "tokenizer": 0.3, "scheduler": 0.3, "detokenizer": 0.3}


class Instance:
    """A heart with a loop that beats by itself, until it is stuck."""

    def __init__(self, redis: RedisSettings, name: str, role: Role = "tokenizer", **options: Any) -> None:
        self.broker = Broker(redis, name=name)
        self.metrics = Metrics(role, name, "m", "0")
        self.pulse = Pulse()
        self.load = 0
        self.stuck = threading.Event()
        options = {"leases": LEASES, "interval_s": 0.05, **options}
        self.heart = Heart(self.broker, role, name, self.describe, self.metrics, **options)
        self._loop = threading.Thread(target=self._run)
        self._loop.start()
        self.heart.start()

    def _run(self) -> None:
        while not self.stuck.wait(0.01):
            self.pulse.beat()

    def describe(self) -> Heartbeat:
        self.load += 1
        return Heartbeat(self.pulse.count, "x", num_running=self.load)

    def stop(self, *, leave: bool = False) -> None:
        self.stuck.set()
        self._loop.join()
        self.heart.stop(leave=leave)
        self.broker.close()


@pytest.fixture
def start(redis_settings: RedisSettings) -> Iterator[Callable[..., Instance]]:
    started: list[Instance] = []

    def start(name: str, *, redis: RedisSettings = redis_settings, announced: bool = True, **options: Any) -> Instance:
        instance = Instance(redis, name, **options)
        started.append(instance)
        if announced:
            instance.heart.announce()
        return instance

    yield start
    for instance in started:
        instance.stop()


def test_an_instance_is_registered_only_when_announced(broker: Broker, start: Callable[..., Instance]) -> None:
    one = start("one", announced=False)
    assert one.heart.wait_up(20)
    assert one.heart.up
    assert one.heart.agreement.num_shards == 4
    assert one.heart.since_beat_s == float("inf")
    assert broker.run(look(broker.keys, "tokenizer")) == {}
    one.heart.announce()
    eventually(lambda: "one" in one.heart.living("tokenizer"), "it sees itself")
    assert one.heart.since_beat_s < 20


def test_leases_end_while_one_is_not_yet_registered(broker: Broker, start: Callable[..., Instance]) -> None:
    old, new = start("old"), start("new", announced=False)
    eventually(lambda: "old" in new.heart.living("tokenizer"), "the old one is seen")
    old.stop(leave=False)
    eventually(lambda: "old" in new.heart.dead("tokenizer"), "its lease is over")
    assert set(broker.run(look(broker.keys, "tokenizer"))) == {"old"}


def test_siblings_and_watched_roles_are_seen(start: Callable[..., Instance]) -> None:
    one = start("one", watch=["scheduler"])
    start("two")
    start("engine", role="scheduler")
    eventually(lambda: set(one.heart.living("tokenizer")) == {"one", "two"}, "both tokenizers are seen")
    eventually(lambda: set(one.heart.living("scheduler")) == {"engine"}, "the engine is seen")
    assert one.heart.living("api") == {}


def test_a_stuck_loop_is_dead_though_its_load_changes(broker: Broker, start: Callable[..., Instance]) -> None:
    one, two = start("one"), start("two")
    eventually(lambda: "two" in one.heart.living("tokenizer"), "the other one is seen")
    two.stuck.set()
    value = one.metrics.registry.get_sample_value
    assert value("millrace_leases_lost_total", {"role": "tokenizer"}) == 0
    assert value("millrace_instances_living", {"role": "tokenizer"}) == 2
    eventually(lambda: "two" in one.heart.dead("tokenizer"), "the other one is dead")
    eventually(lambda: value("millrace_leases_lost_total", {"role": "tokenizer"}) == 1, "and counted, once")
    assert value("millrace_instances_living", {"role": "tokenizer"}) == 1
    assert "two" not in one.heart.living("tokenizer")
    assert one.heart.dead("tokenizer")["two"] == broker.run(look(broker.keys, "tokenizer"))["two"]
    assert decode(Heartbeat, one.heart.dead("tokenizer")["two"]).beat == two.pulse.count
    load = two.load
    eventually(lambda: two.load > load + 2, "its load goes on changing")
    assert "two" in one.heart.dead("tokenizer")


def test_a_death_that_is_told_is_seen_at_the_next_look(broker: Broker, start: Callable[..., Instance]) -> None:
    told = threading.Event()
    two = start("two")
    one = start("one", on_death=told.set, leases=dict.fromkeys(LEASES, 600.0), interval_s=600.0)
    eventually(lambda: "two" in broker.run(look(broker.keys, "tokenizer")), "the other one is registered")
    two.stop(leave=False)
    one.heart.hurry()
    eventually(lambda: "two" in one.heart.living("tokenizer"), "the other one is seen")
    beat = broker.run(look(broker.keys, "tokenizer"))["two"]
    assert broker.run(pronounce(broker.keys, "tokenizer", "two", beat))
    one.heart.hurry()
    assert told.wait(20)
    assert "two" in one.heart.dead("tokenizer") and "two" not in one.heart.living("tokenizer")


def test_who_signs_off_is_gone_at_once(broker: Broker, start: Callable[..., Instance]) -> None:
    one, two = start("one"), start("two")
    eventually(lambda: "two" in one.heart.living("tokenizer"), "the other one is seen")
    two.stop(leave=True)
    assert set(broker.run(look(broker.keys, "tokenizer"))) == {"one"}
    eventually(lambda: "two" not in one.heart.living("tokenizer"), "it is gone")
    assert one.heart.dead("tokenizer") == {}


def test_who_crashes_stays_registered_until_its_lease_is_over(broker: Broker, start: Callable[..., Instance]) -> None:
    one, two = start("one"), start("two")
    eventually(lambda: "two" in one.heart.living("tokenizer"), "the other one is seen")
    two.stop(leave=False)
    assert "two" in broker.run(look(broker.keys, "tokenizer"))
    eventually(lambda: "two" in one.heart.dead("tokenizer"), "the other one is dead")


def test_a_broker_that_goes_and_comes_is_told_and_kills_nobody(
    start_redis: Callable[..., RedisServer], start: Callable[..., Instance]
) -> None:
    server = start_redis()
    redis = RedisSettings(redis_url=server.url, redis_prefix="t")
    back = threading.Event()
    one = start("one", redis=redis, on_up=back.set)
    two = start("two", redis=redis)
    eventually(lambda: "two" in one.heart.living("tokenizer"), "the other one is seen")
    assert not back.is_set()
    server.kill()
    eventually(lambda: not one.heart.up, "the loss is seen")
    assert one.metrics.registry.get_sample_value("millrace_broker_up") == 0
    assert one.metrics.registry.get_sample_value("millrace_instances_living", {"role": "tokenizer"}) == 0
    server.start()
    assert back.wait(20)
    eventually(lambda: set(one.heart.living("tokenizer")) == {"one", "two"}, "both are seen again")
    assert one.heart.dead("tokenizer") == {}
    assert one.metrics.registry.get_sample_value("millrace_broker_reconnects_total") == 1
    two.stop()
    one.stop()


def test_a_broker_that_comes_late_is_waited_for(
    start_redis: Callable[..., RedisServer], start: Callable[..., Instance]
) -> None:
    server = start_redis()
    server.kill()
    one = start("one", redis=RedisSettings(redis_url=server.url, redis_prefix="t"))
    assert not one.heart.wait_up(0.2)
    server.start()
    assert one.heart.wait_up(20)
    one.stop()


def test_a_registry_that_is_none_is_got_over(broker: Broker, start: Callable[..., Instance]) -> None:
    broker.run(command("SET", broker.keys.alive("tokenizer"), "x"))
    one = start("one")
    assert one.heart.wait_up(20)
    name = "millrace_broker_strange_keys_total"
    eventually(lambda: one.metrics.registry.get_sample_value(name) == 1, "it is counted")


def test_another_wire_version_is_fatal(broker: Broker, start: Callable[..., Instance]) -> None:
    errors: list[MillraceError] = []
    stopped = threading.Event()

    def on_fatal(error: MillraceError) -> None:
        errors.append(error)
        stopped.set()

    broker.prepare()
    for name in ("wire", "wire_version"):
        broker.run(command("HSET", broker.keys.meta, name, 999))
    start("one", on_fatal=on_fatal)
    assert stopped.wait(20)
    assert isinstance(errors[0], ConfigError)
    assert "wire version 999" in str(errors[0])
