"""Dead engines: whose requests are taken over, and whose are left alone."""

from shared.broker import control
from shared.broker.connection import Broker
from shared.messages import Heartbeat
from shared.settings import RedisSettings
from tests.fakes.engines import HostedEngine
from tests.fakes.front import Front
from tests.waiting import eventually


def bury_alive(front: Front, name: str, fingerprint: str = "fake", count: int = 0) -> list[str]:
    """Register an engine that will never beat again, with some requests in its stream."""
    beat = Heartbeat(1, name, model="tiny", fingerprint=fingerprint)
    front.broker.run(control.beat_and_look(front.keys, "scheduler", name, beat, ["scheduler"]))
    return [front.open(name, prompt_ids=[i, 2], max_tokens=10) for i in range(count)]


def test_everything_a_dead_engine_had_is_taken_and_it_is_forgotten(
    redis_settings: RedisSettings, broker: Broker
) -> None:
    front = Front(broker)
    with HostedEngine(redis_settings, "e1") as engine:
        uids = bury_alive(front, "dead", count=30)
        found = front.finish(*uids)
        assert all(reply.engine == "e1" and reply.tries == [1] for reply in found)
        eventually(lambda: "dead" not in front.beats(), "it is forgotten")
        assert front.entries("dead") == []
        assert engine.counter("millrace_takeovers_total", why="crash") == 30


def test_an_engine_of_another_fingerprint_is_not_taken_from(redis_settings: RedisSettings, broker: Broker) -> None:
    front = Front(broker)
    with HostedEngine(redis_settings, "e1") as engine:
        (uid,) = bury_alive(front, "other", "another-model", 1)
        bury_alive(front, "empty", "another-model")
        eventually(lambda: "empty" not in front.beats(), "one with nothing left is forgotten by anybody")
        assert front.entries("other") == [uid]
        assert engine.counter("millrace_takeovers_total", why="crash") == 0
        front.end(uid)


def test_two_survivors_share_what_a_dead_engine_had(redis_settings: RedisSettings, broker: Broker) -> None:
    front = Front(broker)
    with HostedEngine(redis_settings, "e1"), HostedEngine(redis_settings, "e2"):
        uids = bury_alive(front, "dead", count=60)
        found = front.finish(*uids)
        shares = {name: sum(reply.engine == name for reply in found) for name in ("e1", "e2")}
        assert shares["e1"] + shares["e2"] == 60 and min(shares.values()) >= 8
        assert all(len(reply.attempts) == 1 for reply in found), "nobody took what the other had"


def test_a_request_that_ended_while_its_engine_was_dead_is_not_launched(
    redis_settings: RedisSettings, broker: Broker
) -> None:
    front = Front(broker)
    (uid,) = bury_alive(front, "dead", count=1)
    assert front.end(uid) == "OK"
    with HostedEngine(redis_settings, "e1"):
        eventually(lambda: "dead" not in front.beats(), "it is forgotten")
        assert front.reply(uid).attempts == []
        assert front.entries("e1") == []


def test_a_dead_api_replica_is_forgotten_after_a_while(redis_settings: RedisSettings, broker: Broker) -> None:
    keys = broker.keys
    broker.run(control.beat_and_look(keys, "api", "a-dead", Heartbeat(1, "a"), ["api"]))
    with HostedEngine(redis_settings, "e1", api_lease_s=0.5) as engine:
        eventually(lambda: "a-dead" in engine.heart.dead("api"), "it is seen dead")
        eventually(lambda: broker.run(control.look(keys, "api")) == {}, "it is forgotten")
