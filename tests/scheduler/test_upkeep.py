"""What an engine does when the broker is not as it left it: lost keys, lost logs, entries of strangers, dead api."""

import time
from collections.abc import Iterator

import pytest

from services.scheduler.fake_engine import FakeEngineConfig
from shared.broker import control, dead_letters
from shared.broker.connection import Broker
from shared.broker.log_id import is_end, split_log_id
from shared.messages import GenerateRequest, Heartbeat, encode
from shared.sampling import SamplingParams
from shared.settings import RedisSettings
from tests.fakes.engines import HostedEngine
from tests.fakes.front import SHARDS, Front
from tests.redis_keys import command
from tests.waiting import eventually


@pytest.fixture
def front(broker: Broker) -> Front:
    return Front(broker)


@pytest.fixture
def engine(redis_settings: RedisSettings) -> Iterator[HostedEngine]:
    with HostedEngine(redis_settings, "e1") as engine:
        yield engine


@pytest.fixture
def watchful(redis_settings: RedisSettings) -> Iterator[HostedEngine]:
    """An engine for which an api replica is dead after a second."""
    with HostedEngine(redis_settings, "e1", api_lease_s=1.0) as engine:
        yield engine


def running(front: Front, engine: HostedEngine, max_tokens: int = 2000, **options: object) -> str:
    uid = front.open(engine.me, max_tokens=max_tokens, **options)  # type: ignore[arg-type]
    front.until(lambda: front.said(uid) > 3, "it is running")
    return uid


def test_an_abort_frees_the_slot_by_its_doorbell(front: Front, engine: HostedEngine) -> None:
    uid = running(front, engine)
    assert front.end(uid) == "OK"
    eventually(lambda: engine.is_whole, "slots and pages are free")
    assert engine.counter("millrace_aborts_total", cause="doorbell") == 1
    assert front.end(uid) == "ENDED"
    assert front.entries(engine.me) == []


def test_an_abort_whose_key_was_deleted_is_seen_by_the_audit(front: Front, engine: HostedEngine) -> None:
    uid = running(front, engine)
    front.end_without_doorbell(uid)
    eventually(lambda: engine.is_whole, "slots and pages are free")
    assert engine.counter("millrace_aborts_total", cause="audit") == 1


def test_a_doorbell_without_a_terminal_is_not_believed(front: Front, engine: HostedEngine) -> None:
    uid = front.open(engine.me, max_tokens=60)
    front.broker.run(command("SET", front.keys.abort(uid), "1", "PX", 60_000))
    (reply,) = front.finish(uid)
    assert reply.finish == "length" and len(reply.attempts) == 1


def test_a_request_whose_log_was_deleted_is_forgotten(front: Front, engine: HostedEngine) -> None:
    uid = running(front, engine)
    front.broker.run(command("DEL", front.keys.reply(uid)))
    eventually(lambda: engine.is_whole, "slots and pages are free")
    assert front.entries(engine.me) == []
    assert front.last_ids([uid]) == [b""], "nobody has made the log anew"


def test_a_waiting_request_that_ends_leaves_the_queue(front: Front, redis_settings: RedisSettings) -> None:
    with HostedEngine(redis_settings, "e1", FakeEngineConfig(base_ms=2.0, max_running=1)) as engine:
        first = running(front, engine)
        waiting = [front.open(engine.me) for _ in range(20)]
        eventually(lambda: engine.link.num_waiting == 20, "twenty wait")
        for uid in waiting:
            front.end(uid)
        eventually(lambda: engine.link.num_waiting == 0, "nobody waits")
        front.end(first)
        eventually(lambda: engine.is_whole, "slots and pages are free")


def test_tokens_that_were_lost_are_computed_again(front: Front, engine: HostedEngine) -> None:
    calm = front.finish(front.open(engine.me, max_tokens=60))[0]
    uid = front.open(engine.me, max_tokens=60)
    front.until(lambda: front.said(uid) > 3, "some are said")
    eventually(lambda: any(chunk.finishes for chunk in front.unsaid()), "its end is on its way")
    for shard in range(SHARDS):
        front.broker.run(command("XTRIM", front.keys.tokens("tiny", shard), "MAXLEN", 0))
    (reply,) = front.finish(uid)
    assert reply.tokens == calm.tokens
    assert len(reply.attempts) == 2
    assert engine.counter("millrace_log_restarts_total") == 1


def test_a_log_that_lost_its_fence_is_fenced_anew(front: Front, engine: HostedEngine) -> None:
    calm = front.finish(front.open(engine.me, max_tokens=800))[0]
    uid = front.open(None, max_tokens=800)
    key = front.keys.reply(uid)
    before = front.broker.run(command("DUMP", key))
    assert isinstance(before, bytes)
    front.move(engine.me, GenerateRequest(uid, [1, 2, 3], SamplingParams(max_tokens=800)))
    front.until(lambda: front.said(uid) > 3, "it is running")
    front.broker.run(command("RESTORE", key, 600_000, before, "REPLACE"))
    front.forget(uid)
    (reply,) = front.finish(uid)
    assert reply.tokens == calm.tokens
    assert len(reply.attempts) == 1, "the first fence is lost with the rest"


def test_an_entry_of_a_stranger_is_buried(front: Front, engine: HostedEngine) -> None:
    stream = front.keys.generate(engine.me)
    front.broker.run(command("XADD", stream, "*", "x", b"\xff\x00"))
    front.broker.run(command("XADD", stream, "*", "u", "nobody", "m", b"\xc1"))
    uid = front.open(engine.me)
    broken = front.open(None)
    front.broker.run(command("XADD", stream, "*", "u", broken, "m", encode(Heartbeat(1, "no request"))))
    replies = front.finish(uid, broken)
    assert replies[0].finish == "length"
    assert replies[1].error is not None and replies[1].error.status == 500
    eventually(lambda: not front.entries(engine.me), "the entries are deleted")
    letters = [letter for _, letter in front.broker.run(dead_letters.list_dead(front.keys))]
    assert sorted(letter.uid for letter in letters) == sorted(["", "nobody", broken])


def test_a_second_entry_of_a_running_request_is_deleted(front: Front, engine: HostedEngine) -> None:
    uid = running(front, engine, 300)
    twin = GenerateRequest(uid, [1, 2, 3], SamplingParams(max_tokens=300))
    front.broker.run(command("XADD", front.keys.generate(engine.me), "*", "u", uid, "m", encode(twin)))
    (reply,) = front.finish(uid)
    assert len(reply.attempts) == 1 and len(reply.tokens) == 300
    eventually(lambda: engine.is_whole, "nothing is held")


def test_a_request_that_its_api_has_opened_again_starts_anew(front: Front, engine: HostedEngine) -> None:
    calm = front.finish(front.open(engine.me, max_tokens=400))[0]
    uid = running(front, engine, 400)
    said = front.reply(uid).tokens[:2]
    front.open_again(uid, engine.me, said, max_tokens=400)
    (reply,) = front.finish(uid)
    assert reply.tokens == calm.tokens
    eventually(lambda: engine.is_whole, "nothing is held")


def test_plain_requests_of_a_dead_api_are_ended_and_resumable_ones_go_on(front: Front, watchful: HostedEngine) -> None:
    front.broker.run(control.beat_and_look(front.keys, "api", "api-1", Heartbeat(1, "api-1"), ["api"]))
    plain = running(front, watchful, replica="api-1")
    absent = running(front, watchful, replica="api-never-seen")
    resumable = running(front, watchful, 900, replica="api-1", resumable_ms=60_000)
    ends = front.finish(plain, absent, resumable)
    assert [reply.error.code if reply.error else None for reply in ends] == ["replica_lost", "replica_lost", None]
    assert ends[2].finish == "length"
    eventually(lambda: watchful.is_whole, "nothing is held")


def test_the_requests_of_a_living_api_stay(front: Front, watchful: HostedEngine) -> None:
    uid = front.open(watchful.me, max_tokens=1500, replica="api-1")
    beats = 0

    def beat() -> bool:
        nonlocal beats
        beats += 1
        front.broker.run(control.beat_and_look(front.keys, "api", "api-1", Heartbeat(beats, "api-1"), ["api"]))
        return is_end(front.last_ids([uid])[0])

    began = time.monotonic()
    front.until(beat, "it ends")
    assert front.reply(uid).finish == "length"
    assert time.monotonic() - began > 2.0, "longer than the lease of an api, so that it could have been ended"


def test_the_step_loop_waits_for_the_detokenizers(
    front: Front, engine: HostedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.scheduler.outbox.TOKENS_PAUSE_LEN", 40)
    monkeypatch.setattr("services.scheduler.outbox.RESUME_LEN", 20)
    uid = front.open(engine.me, max_tokens=2000)
    eventually(lambda: engine.link.paused, "it waits")
    (reply,) = front.finish(uid)
    assert len(reply.tokens) == 2000 and split_log_id(reply.last)[1] == 2000
