"""The scheduler as a process: takeover, pauses, drains, poison, with every token compared."""

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from services.scheduler.service import SchedulerService
from services.scheduler.settings import SchedulerSettings
from shared.broker import dead_letters, replies
from shared.broker.connection import Broker
from shared.broker.log_id import is_end
from shared.messages import Heartbeat
from shared.runtime import Life
from shared.settings import RedisSettings
from tests.fakes.engines import SchedulerProcess
from tests.fakes.front import Front, Reply
from tests.waiting import eventually

Start = Callable[..., SchedulerProcess]


@pytest.fixture
def front(broker: Broker) -> Front:
    return Front(broker)


@pytest.fixture
def start(redis_settings: RedisSettings, tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def start(name: str = "s0", **settings: object) -> SchedulerProcess:
            return stack.enter_context(SchedulerProcess(redis_settings, name, tmp_path / f"{name}.log", **settings))

        yield start


def open_many(front: Front, engine: str, count: int, max_tokens: int = 120, base: int = 0) -> list[str]:
    return [front.open(engine, prompt_ids=[base + i, 7, 9], max_tokens=max_tokens, seed=i) for i in range(count)]


def assert_same_as_undisturbed(front: Front, engine: str, found: list[Reply], max_tokens: int = 120) -> None:
    """Run the same prompts without a fault: every token hangs on all before it, so a splice would show."""
    calm = front.finish(*open_many(front, engine, len(found), max_tokens))
    for disturbed, undisturbed in zip(found, calm, strict=True):
        assert disturbed.finish == undisturbed.finish == "length"
        assert disturbed.tokens == undisturbed.tokens


def is_quiet(front: Front, engine: str, pages: int = 4096) -> bool:
    beat = front.beats()[engine]
    return not beat.num_running and not beat.num_waiting and beat.free_pages == pages and not front.entries(engine)


def test_answers_and_ends_cleanly(front: Front, start: Start) -> None:
    process = start()
    engine = process.ready(front)
    found = front.finish(*open_many(front, engine, 100, 20))
    assert all(len(reply.tokens) == 20 and reply.finish == "length" for reply in found)
    assert all(len(reply.attempts) == 1 and reply.tries == [1] for reply in found)
    assert front.refused == 0
    eventually(lambda: is_quiet(front, engine), "slots and pages are free")
    process.send(signal.SIGTERM)
    assert process.wait() == 0
    assert engine not in front.beats()


def test_tells_how_much_it_can_hold(front: Front, start: Start) -> None:
    """Of a request: the model's context, or all its pages where those are fewer."""
    sizes = [{"num_pages": pages, "page_size": 16, "max_seq_len": 200} for pages in (5, 100)]
    engines = [start(f"s{i}", **size).ready(front) for i, size in enumerate(sizes)]
    held = [front.beats()[engine].max_seq_len for engine in engines]
    assert held == [80, 200]


def test_a_killed_engine_is_taken_over_by_a_survivor(front: Front, start: Start) -> None:
    first, second = start("s0", fake_step_ms=5, max_running_requests=8), start("s1", fake_step_ms=5)
    dead, survivor = first.ready(front), second.ready(front)
    uids = open_many(front, dead, 12)  # four of them wait for a slot
    front.until(lambda: front.said(*uids[:8]) > 5, "eight are running")
    first.kill()
    found = front.finish(*uids)
    assert all(reply.engine == survivor for reply in found)
    assert all(len(reply.attempts) == 2 and reply.tries[-1] == 1 for reply in found[:8])
    assert_same_as_undisturbed(front, survivor, found)
    eventually(lambda: dead not in front.beats(), "the dead engine is forgotten")
    eventually(lambda: is_quiet(front, survivor), "slots and pages are free")


def test_a_killed_engine_is_taken_over_by_its_own_successor(front: Front, start: Start) -> None:
    process = start(fake_step_ms=5)
    dead = process.ready(front)
    uids = open_many(front, dead, 6)
    front.until(lambda: front.said(*uids) > 5, "all are running")
    process.kill()
    process.start()
    successor = process.ready(front)
    found = front.finish(*uids)
    assert all(reply.engine == successor for reply in found)
    assert_same_as_undisturbed(front, successor, found)


def test_a_stopped_engine_says_nothing_more_when_it_wakes(front: Front, start: Start) -> None:
    first, second = start("s0", fake_step_ms=5), start("s1", fake_step_ms=5)
    sleeper, survivor = first.ready(front), second.ready(front)
    uids = open_many(front, sleeper, 6, 400)
    front.until(lambda: front.said(*uids) > 5, "all are running")
    first.send(signal.SIGSTOP)
    front.until(lambda: all(front.reply(uid).engine == survivor for uid in uids), "all are taken over")
    front.until(lambda: not front.entries(sleeper), "nothing is left with the sleeper")
    heard = len(front.chunks)
    first.send(signal.SIGCONT)
    found = front.finish(*uids)
    assert all(len(reply.attempts) == 2 for reply in found)
    woken = [chunk for chunk in front.chunks[heard:] if chunk.engine == sleeper]
    assert sum(len(chunk.uids) for chunk in woken) <= 2 * len(uids), "at most the steps in flight when it slept"
    assert_same_as_undisturbed(front, survivor, found, 400)
    eventually(lambda: sleeper in front.beats() and is_quiet(front, sleeper), "the sleeper is registered and empty")
    assert front.finish(front.open(sleeper))[0].engine == sleeper


def test_aborts_at_every_moment_free_slots_and_pages(front: Front, start: Start) -> None:
    process = start(fake_step_ms=2, max_running_requests=4, max_prefill_tokens=16)
    engine = process.ready(front)
    chance = random.Random(5)
    uids = []
    for i in range(60):
        uids.append(front.open(engine, prompt_ids=list(range(chance.randrange(1, 100))), max_tokens=40, seed=i))
        for _ in range(chance.randrange(3)):
            front.end(chance.choice(uids))
            front.pump(block_ms=chance.randrange(1, 5))
    for uid in uids[::3] + uids[::3]:
        front.end(uid)
    found = front.finish(*uids)
    assert {reply.finish or "aborted" for reply in found} == {"length", "aborted"}
    eventually(lambda: is_quiet(front, engine), "slots and pages are free")
    seen = process.metrics(front)
    finished = sum(value for key, value in seen.items() if key.startswith("millrace_engine_requests_finished_total"))
    assert finished == len(uids)
    assert seen["millrace_requests_running"] == seen["millrace_requests_waiting"] == 0
    assert seen['millrace_kv_pages{state="live"}'] == 0


def test_an_abort_that_comes_first_keeps_a_request_from_being_launched(front: Front, start: Start) -> None:
    process = start(fake_step_ms=2)
    engine = process.ready(front)
    process.send(signal.SIGSTOP)
    uid = front.open(engine)
    assert front.end(uid) == "OK"
    process.send(signal.SIGCONT)
    eventually(lambda: not front.entries(engine), "its entry is deleted")
    assert front.reply(uid).attempts == []


def test_a_drain_hands_over_to_a_survivor(front: Front, start: Start) -> None:
    first, second = start("s0", fake_step_ms=5, max_running_requests=4), start("s1", fake_step_ms=5)
    old, new = first.ready(front), second.ready(front)
    uids = open_many(front, old, 8)
    front.until(lambda: front.said(*uids[:4]) > 5, "four are running")
    first.send(signal.SIGTERM)
    found = front.finish(*uids)
    assert first.wait() == 0
    assert old not in front.beats()
    assert all(reply.engine == new for reply in found)
    assert all(reply.tries[-1] <= 1 for reply in found), "a drain is no failed launch"
    assert_same_as_undisturbed(front, new, found)


def test_a_drain_without_a_survivor_finishes_what_it_has(front: Front, start: Start) -> None:
    process = start(fake_step_ms=2, max_running_requests=4)
    engine = process.ready(front)
    uids = open_many(front, engine, 8, 50)
    front.until(lambda: front.said(uids[0]), "one is running")
    process.send(signal.SIGTERM)
    found = front.finish(*uids)
    assert process.wait() == 0
    assert all(len(reply.attempts) == 1 for reply in found)
    assert engine not in front.beats()


def test_a_drain_that_runs_out_of_time_leaves_its_requests_to_the_next_engine(front: Front, start: Start) -> None:
    process = start(fake_step_ms=5, drain_timeout=3)
    old = process.ready(front)
    uids = open_many(front, old, 4, 800)
    front.until(lambda: front.said(*uids), "all are running")
    process.send(signal.SIGTERM)
    front.until(lambda: process.process.poll() is not None, "the process has ended")
    assert process.wait() == 0
    assert sorted(front.entries(old)) == sorted(uids)
    new = start("s1", fake_step_ms=1).ready(front)
    found = front.finish(*uids)
    assert all(reply.engine == new and len(reply.tokens) == 800 for reply in found)


def test_a_second_signal_ends_the_process_at_once(front: Front, start: Start) -> None:
    process = start(fake_step_ms=5)
    engine = process.ready(front)
    uid = front.open(engine, max_tokens=4000)
    front.until(lambda: front.said(uid), "it is running")
    process.send(signal.SIGTERM)
    eventually(lambda: front.beats()[engine].draining, "it drains")
    process.send(signal.SIGTERM)
    assert process.wait() != 0


def test_a_poison_request_ends_three_engines_and_no_other_request(front: Front, start: Start) -> None:
    process = start(fake_step_ms=3, fake_crash_marker="66,66,66")
    engine = process.ready(front)
    uids = open_many(front, engine, 6, 300)
    front.until(lambda: front.said(*uids) > 3, "the innocent are running")
    poison = front.open(engine, prompt_ids=[1, 66, 66, 66])
    late = [front.open(engine, prompt_ids=[i, 5], max_tokens=50) for i in range(3)]
    deaths = 0
    while not is_end(front.last_ids([poison])[0]):
        front.pump()
        if process.process.poll() is not None:
            deaths += 1
            assert deaths <= 3, "poison is launched three times at most"
            process.start()
            process.ready(front)
    found = front.finish(poison, *uids, *late, timeout_s=60)
    assert found[0].error is not None and found[0].error.status == 500
    assert found[0].tries == [1, 2, 3]
    assert deaths == 3
    assert all(reply.finish == "length" for reply in found[1:])
    (letter,) = [letter for _, letter in front.broker.run(dead_letters.list_dead(front.keys))]
    assert (letter.uid, letter.reason, letter.tries) == (poison, "poison", 3)
    assert_same_as_undisturbed(front, process.incarnation, found[1:7], 300)


def test_the_log_of_a_held_request_lives_on(front: Front, start: Start) -> None:
    engine = start(fake_step_ms=20).ready(front)
    uid = front.open(engine, max_tokens=400)
    front.until(lambda: replies.Glance(*front.broker.run(replies.sweep(front.keys, [uid]))[0]).held, "it is audited")
    front.end(uid)


def test_a_bad_setting_stops_the_start_and_is_named(start: Start) -> None:
    process = start(page_size=0)
    assert process.wait() == 2
    assert "MILLRACE_PAGE_SIZE" in process.log.read_text()


def test_the_first_heartbeat_says_whose_requests_it_may_take() -> None:
    """An engine that dies before it serves may have been given requests: others must know that they can take them."""
    service = SchedulerService(SchedulerSettings(engine="fake", num_pages=99))
    life = Life("scheduler", service._settings, service)
    service.prepare(life)
    beat = service.heartbeat(Heartbeat(0, "s0", model="tiny"))
    assert beat.fingerprint.startswith("fake")
    assert beat.num_pages == beat.free_pages == 99 and beat.max_running


def test_heartbeats_tell_of_cache_and_takeovers(front: Front, start: Start) -> None:
    first, second = start("s0", fake_step_ms=5), start("s1", fake_step_ms=5)
    dead, survivor = first.ready(front), second.ready(front)
    for _ in range(2):
        front.finish(front.open(survivor, prompt_ids=list(range(64)), max_tokens=4))
    beat = eventually(lambda: (b := front.beats()[survivor]).cache_hit_tokens >= 32 and b, "hits are told")
    assert beat.cache_query_tokens >= beat.cache_hit_tokens
    assert 0 < beat.cached_pages <= beat.free_pages
    assert beat.num_taken == 0
    uids = open_many(front, dead, 3)
    front.until(lambda: front.said(*uids) > 5, "they are running")
    first.kill()
    front.finish(*uids)
    eventually(lambda: front.beats()[survivor].num_taken == 3, "takeovers are told")


def test_the_heart_beats_on_while_a_long_step_is_computed() -> None:
    """The loop waits for the engine meanwhile: others must not take a slow engine for a dead one."""
    service = SchedulerService(SchedulerSettings(engine="fake"))
    service.prepare(Life("scheduler", service._settings, service))
    same = Heartbeat(3, "s0", model="tiny")
    assert service.heartbeat(same).beat == 3
    service._engine.progress = 7  # type: ignore[union-attr]
    assert service.heartbeat(same).beat == 10
