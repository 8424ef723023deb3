import threading
from collections.abc import Callable, Iterator

import pytest

from services.detokenizer.metrics import DROP_REASONS
from services.launcher.redis_server import RedisServer
from shared.broker.connection import Broker
from shared.broker.control import look
from shared.broker.dead_letters import list_dead
from shared.ids import shard_of
from shared.keys import NUM_SHARDS
from shared.messages import FinishReason, encode
from shared.settings import RedisSettings
from tests.detokenizer.instances import ProcessInstance, ThreadInstance
from tests.detokenizer.stage import MODEL, Stage, ids_of
from tests.redis_keys import command
from tests.waiting import eventually

TEXT = "The mill turns, \U0001f642 \u65e5\u672c\u8a9e, and the race runs on. " * 8


class Feeder:
    """An engine that publishes the tokens of several replies, one step after the other, on a thread."""

    def __init__(self, stage: Stage, num_replies: int = 8, text: str = TEXT) -> None:
        self.stage = stage
        self.ids = ids_of(text)
        self.text = text
        self.uids = [stage.open(stop=["\n\n"]) for _ in range(num_replies)]
        self.published = 0
        self._go_on = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._pause = threading.Event()

    def _run(self) -> None:
        for i, token_id in enumerate(self.ids):
            finishes: dict[str, FinishReason] = {}
            if i + 1 == len(self.ids):
                self._go_on.wait(60)
                finishes = dict.fromkeys(self.uids, "length")
            self.stage.publish(self.stage.chunk(dict.fromkeys(self.uids, (i + 1, [token_id])), finishes=finishes))
            self.published = i + 1
            self._pause.wait(0.003)

    def __enter__(self) -> "Feeder":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._go_on.set()
        self._thread.join(60)

    def wait_for(self, num_tokens: int) -> None:
        eventually(lambda: self.published >= num_tokens, f"{num_tokens} tokens are published")

    def check(self) -> None:
        """Everything is said, once, and nothing is left in the streams."""
        self._go_on.set()
        eventually(lambda: all(self.stage.read(uid).end for uid in self.uids), "all replies end")
        for uid in self.uids:
            reply = self.stage.read(uid)
            assert (reply.text, reply.said) == (self.text, len(self.ids))
        wait_until_empty(self.stage)


def wait_until_empty(stage: Stage) -> None:
    streams = [stage.keys.tokens(MODEL, shard) for shard in range(NUM_SHARDS)]
    eventually(lambda: not any(stage.broker.run(command("XLEN", s)) for s in streams), "the token streams are empty")


@pytest.fixture
def stage(broker: Broker) -> Stage:
    return Stage(broker)


@pytest.fixture
def start_thread(redis_settings: RedisSettings) -> Iterator[Callable[..., ThreadInstance]]:
    started: list[ThreadInstance] = []

    def start(name: str = "detokenizer-a", redis: RedisSettings = redis_settings) -> ThreadInstance:
        started.append(ThreadInstance(redis, name))
        return started[-1]

    yield start
    for instance in started:
        instance.stop()


@pytest.fixture
def start_process(redis_settings: RedisSettings) -> Iterator[Callable[[str], ProcessInstance]]:
    started: list[ProcessInstance] = []

    def start(name: str) -> ProcessInstance:
        started.append(ProcessInstance(redis_settings, name))
        return started[-1]

    yield start
    for instance in started:
        instance.kill()


def registered(stage: Stage) -> set[str]:
    """Names of the detokenizers in the registry."""
    return {incarnation.rpartition("-")[0] for incarnation in stage.broker.run(look(stage.keys, "detokenizer"))}


def test_all_that_is_published_is_said_and_deleted(stage: Stage, start_thread: Callable[..., ThreadInstance]) -> None:
    instance = start_thread()
    with Feeder(stage) as feeder:
        feeder.check()
    value = instance.life.metrics.registry.get_sample_value
    assert value("millrace_detokenizer_tokens_total") == len(feeder.uids) * len(feeder.ids)
    assert value("millrace_detokenizer_refused_total") == 0
    assert [value("millrace_detokenizer_dropped_total", {"reason": reason}) for reason in DROP_REASONS] == [0] * 4
    assert value("millrace_detokenizer_rebuilds_total") == len(feeder.uids)
    assert value("millrace_dead_letters_total", {"reason": "undecodable"}) == 0
    assert instance.stop() == 0
    assert registered(stage) == set()


def test_what_was_published_before_anybody_read_is_said(
    stage: Stage, start_thread: Callable[..., ThreadInstance]
) -> None:
    with Feeder(stage) as feeder:
        feeder.wait_for(100)
        start_thread()
        feeder.check()


def test_entries_that_are_no_steps_become_dead_letters(
    stage: Stage, start_thread: Callable[..., ThreadInstance]
) -> None:
    uid = stage.open()
    stream = stage.keys.tokens(MODEL, shard_of(uid, NUM_SHARDS))
    good = stage.chunk({uid: (1, ids_of("a"))})
    bad = [b"", b"\xff\x00", b"\xc0", b"\x91" * 10_000, encode(good)[:-3]]
    bad.append(encode(stage.chunk({uid: (1, ids_of("a")), "x": (1, [])})).replace(b"\x92\x01\x00", b"\x92\x01\x09"))
    for payload in bad:
        stage.broker.run(command("XADD", stream, "*", "m", payload))
    stage.broker.run(command("XADD", stream, "*", "other", "field"))
    stage.publish(good)
    start_thread()
    eventually(lambda: stage.read(uid).text == "a", "the good step is said")
    wait_until_empty(stage)
    letters = [letter for _, letter in stage.broker.run(list_dead(stage.keys))]
    assert len(letters) == len(bad) + 1
    assert all(letter.reason.startswith("undecodable") and letter.body == b"" for letter in letters)


def test_siblings_share_the_streams_and_a_drained_one_hands_over(
    stage: Stage, start_thread: Callable[..., ThreadInstance]
) -> None:
    one, two = start_thread("detokenizer-a"), start_thread("detokenizer-b")
    one.wait_ready()
    two.wait_ready()

    def shards(instance: ThreadInstance) -> float:
        return instance.life.metrics.registry.get_sample_value("millrace_detokenizer_shards") or 0.0

    eventually(lambda: len(registered(stage)) == 2 and shards(one) + shards(two) == NUM_SHARDS, "streams are shared")
    with Feeder(stage) as feeder:
        feeder.wait_for(100)
        assert one.stop() == 0
        eventually(lambda: shards(two) == NUM_SHARDS, "the other one reads all streams")
        feeder.check()


def test_a_successor_does_not_wait_for_the_lease_of_its_predecessor(
    stage: Stage, start_process: Callable[[str], ProcessInstance], start_thread: Callable[..., ThreadInstance]
) -> None:
    before = start_process("detokenizer-a")
    with Feeder(stage) as feeder:
        eventually(lambda: any(stage.read(uid).text for uid in feeder.uids), "the first one speaks")
        before.kill()
        start_thread("detokenizer-a")
        feeder.check()


def test_a_killed_detokenizer_costs_nothing_but_time(
    stage: Stage, start_process: Callable[[str], ProcessInstance]
) -> None:
    instances = [start_process("detokenizer-a"), start_process("detokenizer-b")]
    eventually(lambda: len(registered(stage)) == 2, "both are there")
    with Feeder(stage, 16) as feeder:
        eventually(lambda: all(stage.read(uid).text for uid in feeder.uids), "all replies have begun")
        instances[0].kill()
        feeder.check()
    eventually(lambda: registered(stage) == {"detokenizer-b"}, "the dead one is signed off by the other")
    assert instances[1].terminate() == 0
    assert registered(stage) == set()


def test_sigterm_in_mid_stream_is_a_clean_end(stage: Stage, start_process: Callable[[str], ProcessInstance]) -> None:
    first = start_process("detokenizer-a")
    with Feeder(stage) as feeder:
        eventually(lambda: any(stage.read(uid).text for uid in feeder.uids), "it speaks")
        second = start_process("detokenizer-b")
        assert first.terminate() == 0
        feeder.check()
        assert second.terminate() == 0


def test_the_broker_may_go_away_and_come_back(
    start_redis: Callable[..., RedisServer], start_thread: Callable[..., ThreadInstance]
) -> None:
    server = start_redis(persistent=True)
    redis = RedisSettings(redis_url=server.url, redis_prefix="t")
    with Broker(redis) as broker:
        stage = Stage(broker)
        uid = stage.open()
        instance = start_thread(redis=redis)
        instance.wait_ready()
        stage.publish(stage.chunk({uid: (1, ids_of("ab"))}))
        eventually(lambda: stage.read(uid).text == "ab", "the first tokens are said")
        server.kill()
        eventually(lambda: instance.life.readiness.what_is_missing() == ["broker"], "it is not ready")
        server.start()
        instance.wait_ready()
        broker.close()
        stage = Stage(broker)
        again = stage.open()
        stage.publish(stage.chunk({again: (1, ids_of("cd"))}))
        eventually(lambda: stage.read(again).text == "cd", "it speaks again")
        instance.stop()


def test_a_stream_that_is_none_is_put_aside(stage: Stage, start_thread: Callable[..., ThreadInstance]) -> None:
    instance = start_thread()
    instance.wait_ready()
    broken = stage.keys.tokens(MODEL, 2)
    stage.broker.run(command("SET", broken, "x"))
    with Feeder(stage, text="short") as feeder:
        feeder.check()
    eventually(lambda: stage.broker.run(command("GET", stage.keys.aside(broken))) == b"x", "it was put aside")
    instance.wait_ready()
