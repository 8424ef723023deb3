"""The shell's own replica beside a broker that has lost what it said: no word twice, none of another attempt."""

import threading

import pytest

from services.launcher.replica import WORKERS, AnswerFailed, Replica
from shared.broker import control
from shared.broker.connection import Broker
from shared.broker.log_id import split_log_id
from shared.broker.replies import OpenEntry
from shared.broker.streams import GenerateEntry
from shared.errors import Unavailable
from shared.messages import FinishReason, Heartbeat, ReplyHeader
from shared.sampling import SamplingParams
from shared.settings import RedisSettings, ServiceSettings
from tests.contract.broker_driver import MODEL, Driver
from tests.waiting import eventually


class Listener:
    """Asks on a thread of its own and keeps what it hears."""

    def __init__(self, settings: RedisSettings) -> None:
        words = {"redis_url": settings.redis_url, "redis_prefix": settings.redis_prefix, "served_model_name": MODEL}
        self._replica = Replica(ServiceSettings(**words))  # type: ignore[arg-type]
        self.heard: list[int] = []
        self.text = ""
        self.error: AnswerFailed | None = None
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        try:
            for delta in self._replica.ask([{"role": "user", "content": "x"}], SamplingParams()):
                self.heard += delta.token_ids
                self.text += delta.text
        except AnswerFailed as e:
            self.error = e

    def finish(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._replica.close()


def taken(driver: Driver) -> GenerateEntry:
    """Play tokenizer and engine for the request that was queued last."""
    entry = eventually(lambda: queued(driver), "it is queued")
    assert driver.fence(entry).outcome == "OK"
    return entry


def queued(driver: Driver) -> GenerateEntry | None:
    if not driver.redis("XLEN", driver.keys.tokenize(MODEL)):
        return None
    assert driver.run(driver.move_call(driver.read_one())) == "OK"
    return driver.entries()[-1]


def say(driver: Driver, entry: GenerateEntry, ids: list[int], finish: FinishReason | None = None) -> None:
    head = driver.log(entry.uid)[0]
    assert isinstance(head, OpenEntry) and isinstance(head.header, ReplyHeader)
    prev = driver.last(entry.uid)
    item = driver.item(entry, prev, split_log_id(prev)[0], ids, finish=finish)
    assert driver.append(item._replace(replica=head.header.replica)) == [item.log_id]


def lose(driver: Driver, entry: GenerateEntry, listener: Listener) -> None:
    """Say 7 8 9 10, of which the broker then has only 7 8."""
    say(driver, entry, [7, 8])
    kept = driver.redis("DUMP", driver.keys.reply(entry.uid))
    say(driver, entry, [9, 10])
    eventually(lambda: listener.heard == [7, 8, 9, 10], "all is heard")
    driver.redis("RESTORE", driver.keys.reply(entry.uid), 60_000, kept, "REPLACE")


@pytest.fixture
def driver(broker: Broker) -> Driver:
    return Driver(broker)


def test_a_log_that_lost_what_was_said_is_opened_again_with_it(driver: Driver, redis_settings: RedisSettings) -> None:
    listener = Listener(redis_settings)
    entry = taken(driver)
    lose(driver, entry, listener)
    say(driver, entry, [50, 51, 52])
    again = taken(driver)
    assert again.uid == entry.uid
    assert driver.tokens(entry.uid) == [7, 8, 9, 10]
    say(driver, again, [11], "length")
    listener.finish()
    assert listener.error is None
    assert (listener.heard, listener.text) == ([7, 8, 9, 10, 11], "<7><8><9><10><11>")


def test_an_answer_that_ended_otherwise_is_an_error(driver: Driver, redis_settings: RedisSettings) -> None:
    listener = Listener(redis_settings)
    entry = taken(driver)
    lose(driver, entry, listener)
    say(driver, entry, [50, 51, 52], "length")
    listener.finish()
    assert listener.error is not None and listener.error.code == "broker_lost_data"
    assert listener.heard == [7, 8, 9, 10]


def serve(broker: Broker, *models: str) -> None:
    """Play one instance of each service per model, as far as the registry knows."""
    for role in WORKERS:
        for model in models:
            beat = Heartbeat(beat=1, name=model, model=model)
            broker.run(control.beat_and_look(broker.keys, role, f"{role}-{model}", beat, (role,)))


def joined(settings: RedisSettings, *, any_model: bool) -> str:
    words = {"redis_url": settings.redis_url, "redis_prefix": settings.redis_prefix, "served_model_name": "mine"}
    replica = Replica(ServiceSettings(**words), any_model=any_model)  # type: ignore[arg-type]
    try:
        replica.start(60)
        return replica.model
    finally:
        replica.close()


def test_without_a_name_the_only_model_answers(broker: Broker, redis_settings: RedisSettings) -> None:
    serve(broker, "theirs")
    assert joined(redis_settings, any_model=True) == "theirs"


def test_a_model_that_is_not_there_is_told_with_those_that_are(broker: Broker, redis_settings: RedisSettings) -> None:
    serve(broker, "theirs", "another")
    for any_model in (False, True):
        with pytest.raises(Unavailable, match="no service here serves `mine`; there is: another, theirs"):
            joined(redis_settings, any_model=any_model)
