"""A parent that has seen its child end says so: whose lease that ends, and whose it never does."""

from collections.abc import Callable

import pytest

from services.launcher.deaths import Deaths
from services.launcher.redis_server import RedisServer
from shared.broker.connection import Broker
from shared.broker.control import Observer, beat_and_look, look
from shared.keys import Role
from shared.messages import Heartbeat, decode
from shared.settings import RedisSettings
from tests.redis_keys import command


def register(broker: Broker, role: Role, incarnation: str, birth: str) -> None:
    beat = Heartbeat(1, "scheduler-0", port=9102, birth=birth)
    broker.run(beat_and_look(broker.keys, role, incarnation, beat, [role]))


def ended(broker: Broker, role: Role) -> dict[str, bool]:
    return {name: decode(Heartbeat, beat).ended for name, beat in broker.run(look(broker.keys, role)).items()}


def test_all_that_was_started_together_has_ended_and_nobody_else(redis_settings: RedisSettings, broker: Broker) -> None:
    roles: tuple[Role, ...] = ("api", "scheduler")
    for role in roles:
        for number, birth in enumerate(("b1", "b1", "b2", "")):
            register(broker, role, f"{role}-{number}", birth)
    assert Deaths(redis_settings).tell("api", "b1")
    assert ended(broker, "api") == {"api-0": True, "api-1": True, "api-2": False, "api-3": False}
    assert not any(ended(broker, "scheduler").values())
    observer = Observer("me")
    observer.note({"api": broker.run(look(broker.keys, "api"))})
    assert set(observer.dead("api")) == {"api-0", "api-1"}, "at the first look"
    assert set(observer.living("api")) == {"api-2", "api-3"}


def test_who_beats_again_lives_again(redis_settings: RedisSettings, broker: Broker) -> None:
    register(broker, "scheduler", "one", "b1")
    assert Deaths(redis_settings).tell("scheduler", "b1")
    register(broker, "scheduler", "one", "b1")
    assert ended(broker, "scheduler") == {"one": False}


def test_what_never_was_registered_has_no_lease(redis_settings: RedisSettings, broker: Broker) -> None:
    deaths = Deaths(redis_settings)
    assert not deaths.tell("scheduler", "b1")
    assert not deaths.tell("redis", "b1")
    broker.run(command("HSET", broker.keys.alive("scheduler"), "stranger", b"\xff\x00"))
    assert not deaths.tell("scheduler", "b1")


def test_a_broker_that_is_away_holds_nobody_up(start_redis: Callable[..., RedisServer]) -> None:
    server = start_redis()
    deaths = Deaths(RedisSettings(redis_url=server.url))
    assert not deaths.tell("scheduler", "b1")
    server.kill()
    assert not deaths.tell("scheduler", "b1")


@pytest.mark.parametrize("beat", [b"\xff", b""])
def test_a_beat_that_cannot_be_read_is_left_alone(redis_settings: RedisSettings, broker: Broker, beat: bytes) -> None:
    broker.run(command("HSET", broker.keys.alive("api"), "later", beat))
    assert not Deaths(redis_settings).tell("api", "")
    assert broker.run(look(broker.keys, "api")) == {"later": beat}
