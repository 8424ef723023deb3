"""The protocol, checked by random lives on a real Redis with the real scripts.

`MODEL_EXAMPLES=500 pytest tests/model --hypothesis-seed=1` looks longer; a failure is shrunk to the fewest faults.
"""

import itertools
import os
import uuid
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from shared.broker.connection import Broker
from shared.settings import RedisSettings
from tests.model.engine import Engine
from tests.model.machines import Api
from tests.model.town import KINDS, Town
from tests.model.world import Violation
from tests.redis_keys import delete_keys

EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", "40"))
TURNS = st.integers(10, 100)
SEEDS = st.integers(0, 2**32)
PLACES = st.integers(0, 1)
ROLES = st.integers(0, len(KINDS) - 1)


class Lives(RuleBasedStateMachine):
    """Faults that lose no data: the promise holds without any excuse but a paused api's."""

    broker: ClassVar[Broker]
    redis: ClassVar[RedisSettings]
    poison: ClassVar[bool] = False
    forgetful: ClassVar[bool] = False
    readers: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.prefix = f"{self.broker.keys.prefix}:{uuid.uuid4().hex[:8]}"
        self.town: Town | None = None
        self.broken = False

    @initialize()
    def begin(self) -> None:
        options = {"poison": self.poison, "forgetful": self.forgetful, "readers": self.readers}
        self.town = Town(self.broker, self.prefix, **options)

    def live(self, turns: int, seed: int, mischief: bool) -> None:
        assert self.town is not None
        try:
            self.town.turns(turns, seed, mischief=mischief)
        except Violation:
            self.broken = True
            raise

    @rule(turns=TURNS, seed=SEEDS)
    def work(self, turns: int, seed: int) -> None:
        self.live(turns, seed, mischief=False)

    @rule(turns=TURNS, seed=SEEDS)
    def work_with_crashes_and_lost_answers(self, turns: int, seed: int) -> None:
        self.live(turns, seed, mischief=True)

    @rule(kind=ROLES, place=PLACES)
    def kill(self, kind: int, place: int) -> None:
        self.town.kill(kind, place)

    @rule(kind=ROLES, place=PLACES, turns=st.integers(5, 200))
    def pause(self, kind: int, place: int, turns: int) -> None:
        self.town.pause(kind, place, turns)

    @rule(place=PLACES)
    def drain(self, place: int) -> None:
        self.town.drain(place)

    @invariant()
    def holds(self) -> None:
        try:
            self.town.check_now()
        except Violation:
            self.broken = True
            raise

    def teardown(self) -> None:
        try:
            if self.town is not None and not self.broken:
                self.town.settle()
                self.town.check_now()
                self.town.check_ends()
        finally:
            delete_keys(self.redis.model_copy(update={"redis_prefix": self.prefix}))


class LivesWithLostData(Lives):
    """And a broker that forgets: every stream ends complete, or says that data was lost."""

    forgetful = True

    @rule(how=st.sampled_from(["save", "save", "roll back", "roll back", "wipe", "delete"]), place=st.integers(0, 1000))
    def lose_data(self, how: str, place: int) -> None:
        world = self.town.world
        match how:
            case "roll back" if world.can_roll_back:
                world.roll_back()
            case "wipe":
                world.wipe()
            case "delete":
                world.delete(place)
            case _:
                world.save()


class LivesWithPoison(Lives):
    """And requests that kill every engine that launches them."""

    poison = True


class LivesWithReaders(Lives):
    """And clients that come back to their streams at any api, alone or several at once, or never."""

    readers = True


class LivesWithReadersAndLostData(LivesWithLostData):
    """And both."""

    readers = True


KINDS_OF_LIVES = [Lives, LivesWithLostData, LivesWithPoison, LivesWithReaders, LivesWithReadersAndLostData]


@pytest.mark.timeout(600)  # to shrink a failure takes its time
@pytest.mark.parametrize("lives", KINDS_OF_LIVES)
def test_the_promise_holds(lives: type[Lives], broker: Broker, redis_settings: RedisSettings) -> None:
    machine = type(lives.__name__, (lives,), {"broker": broker, "redis": redis_settings})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES // 2 if lives.readers else EXAMPLES,
            stateful_step_count=30,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_without_faults_everything_is_done_once(broker: Broker, prefix: str) -> None:
    town = Town(broker, prefix)
    town.turns(1500, seed=1, mischief=False)
    town.settle()
    town.check_ends()
    world = town.world
    worked = [client for client in world.clients.values() if not client.left]
    assert len(worked) >= 3
    assert all(client.end in ("length", "stop") for client in worked)
    unexpected = {event for event in world.events if event not in ("fence OK", "fence ENDED", "fence GONE")}
    assert unexpected == set()
    assert world.events["fence OK"] <= len(world.clients)


def test_the_model_sees_a_broken_rule(broker: Broker, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With takeovers and repairs switched off, the requests of a dead engine hang: the model must notice."""
    monkeypatch.setattr(Engine, "reap", lambda self: None)
    monkeypatch.setattr(Api, "sweep", lambda self: None)
    monkeypatch.setattr("tests.model.town.MAX_CALM_TURNS", 3000)
    town = Town(broker, prefix)
    seeds = itertools.count()
    while not any(client.token_ids for client in town.open_clients):
        town.turns(5, seed=next(seeds), mischief=False)
    for place in (0, 1):
        town.kill(KINDS.index(Engine), place)
    with pytest.raises(Violation, match="not quiet"):
        town.settle()
