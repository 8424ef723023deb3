"""The streams: who holds a request, takeover and handover, launches that are counted, and what a reader gets again."""

import time

import msgspec
import pytest

from shared.broker import control, dead_letters, streams
from shared.broker.connection import Broker
from shared.broker.log_id import split_log_id
from shared.ids import new_uid
from shared.keys import DEAD_CAP, GENERATE_TTL_MS, TOKENIZER_GROUP
from shared.messages import DeadLetter, Heartbeat, StepChunk, decode
from tests.contract.broker_driver import MODEL, Driver

pytestmark = pytest.mark.every_redis


@pytest.fixture
def driver(broker: Broker) -> Driver:
    return Driver(broker)


def chunk(*uids: str, engine: str = "A") -> StepChunk:
    return StepChunk(engine, 0, list(uids), [1] * len(uids), [1] * len(uids), [9] * len(uids))


# --- the queue of the tokenizers ---


def test_the_queue_is_never_trimmed_but_refuses(driver: Driver) -> None:
    uids = [driver.opened(cap=3) for _ in range(3)]
    assert driver.open(new_uid(), cap=3).outcome == "FULL"
    entries = driver.run(streams.read_queue(driver.keys, MODEL, "t1", count=10))
    assert [entry.uids[0] for entry in entries] == uids


def test_what_was_read_and_lost_is_read_again_by_its_consumer(driver: Driver) -> None:
    uid = driver.opened()
    entry = driver.read_one("t1")
    assert driver.run(streams.read_queue(driver.keys, MODEL, "t1", count=10)) == []
    (again,) = driver.run(streams.read_own(driver.keys, MODEL, "t1", count=10))
    assert (again.entry_id, again.uids) == (entry.entry_id, [uid])
    assert driver.run(streams.read_own(driver.keys, MODEL, "t2", count=10)) == []
    assert driver.run(streams.read_own(driver.keys, MODEL, "t1", count=10, after=again.entry_id)) == []


def test_a_deleted_entry_that_is_still_pending_is_skipped(driver: Driver) -> None:
    driver.opened()
    entry = driver.read_one("t1")
    driver.redis("XDEL", driver.keys.tokenize(MODEL), entry.entry_id)
    assert driver.run(streams.read_own(driver.keys, MODEL, "t1", count=10)) == []
    assert driver.run(streams.claim_one(driver.keys, MODEL, "t1", "t2")) is None
    assert driver.run(streams.list_consumers(driver.keys, MODEL))["t1"] == 0, "and nothing is left pending"


def test_a_dead_tokenizers_entries_are_claimed_one_by_one_with_their_count(driver: Driver) -> None:
    uids = [driver.opened(), driver.opened()]
    driver.run(streams.read_queue(driver.keys, MODEL, "dead", count=10))
    first = driver.run(streams.claim_one(driver.keys, MODEL, "dead", "t2"))
    assert first is not None and first.uids == [uids[0]] and first.deliveries == 2
    assert driver.run(streams.list_consumers(driver.keys, MODEL)) == {"dead": 1, "t2": 1}
    third = driver.run(streams.claim_one(driver.keys, MODEL, "t2", "t3"))
    assert third is not None and third.entry_id == first.entry_id and third.deliveries == 3
    second = driver.run(streams.claim_one(driver.keys, MODEL, "dead", "t3"))
    assert second is not None and second.uids == [uids[1]]
    assert driver.run(streams.claim_one(driver.keys, MODEL, "dead", "t3")) is None


def test_a_consumer_goes_only_with_nothing_pending(driver: Driver) -> None:
    driver.opened()
    entry = driver.read_one("dead")
    assert not driver.run(streams.forget_consumer(driver.keys, MODEL, "dead"))
    driver.run(streams.discard(driver.keys, MODEL, entry.entry_id))
    assert driver.run(streams.forget_consumer(driver.keys, MODEL, "dead"))
    assert driver.run(streams.list_consumers(driver.keys, MODEL)) == {}


def test_discard_leaves_neither_entry_nor_pending_id(driver: Driver) -> None:
    driver.opened()
    entry = driver.read_one()
    assert driver.run(streams.discard(driver.keys, MODEL, entry.entry_id))
    assert not driver.run(streams.discard(driver.keys, MODEL, entry.entry_id))
    assert driver.run(streams.length(driver.keys.tokenize(MODEL))) == 0
    assert driver.run(streams.list_consumers(driver.keys, MODEL)) == {"t1": 0}


def test_a_group_that_is_gone_is_made_again_without_skipping_anything(driver: Driver) -> None:
    first = driver.opened()
    driver.read_one()
    second = driver.opened()
    driver.redis("XGROUP", "DESTROY", driver.keys.tokenize(MODEL), TOKENIZER_GROUP)
    entries = driver.run(streams.read_queue(driver.keys, MODEL, "t1", count=10))
    assert [entry.uids[0] for entry in entries] == [first, second]


@pytest.mark.parametrize("lost", ["group", "stream"])
def test_every_group_call_survives_a_lost_group(driver: Driver, lost: str) -> None:
    driver.opened()
    stream = driver.keys.tokenize(MODEL)
    for call, empty in (
        (streams.read_own(driver.keys, MODEL, "t1", count=1), []),
        (streams.claim_one(driver.keys, MODEL, "dead", "t1"), None),
        (streams.forget_consumer(driver.keys, MODEL, "dead"), True),
        (streams.list_consumers(driver.keys, MODEL), {}),
    ):
        if lost == "group":
            driver.redis("XGROUP", "DESTROY", stream, TOKENIZER_GROUP)
        else:
            driver.redis("DEL", stream)
        assert driver.run(call) == empty


def test_is_queued(driver: Driver) -> None:
    opened = driver.open(new_uid())
    assert driver.run(streams.is_queued(driver.keys, MODEL, opened.entry))
    driver.run(driver.move_call(driver.read_one()))
    assert not driver.run(streams.is_queued(driver.keys, MODEL, opened.entry))


# --- moving to an engine, and between engines ---


def test_a_request_is_moved_once_with_all_its_choices(driver: Driver) -> None:
    uids = [new_uid() for _ in range(3)]
    driver.open(*uids)
    entry = driver.read_one()
    driver.end(uids[1])
    assert driver.run(driver.move_call(entry, "A")) == "OK"
    assert driver.run(driver.move_call(entry, "B")) == "DUP"
    assert [e.uid for e in driver.entries("A")] == [uids[0], uids[2]], "an ended choice is left out"
    assert driver.entries("B") == []
    assert 0 < driver.ttl_ms(driver.keys.generate("A")) <= GENERATE_TTL_MS


def test_nothing_is_moved_to_an_engine_that_is_not_registered(driver: Driver) -> None:
    driver.opened()
    entry = driver.read_one()
    state = driver.state()
    assert driver.run(driver.move_call(entry, "nobody")) == "NOENGINE"
    assert driver.state() == state
    assert driver.run(driver.move_call(entry, "A")) == "OK"


def test_a_survivor_takes_what_was_never_read(driver: Driver) -> None:
    entry = driver.queued("A")
    assert driver.take(entry, "A", "B") == "OK"
    assert driver.take(entry, "A", "C") == "NOENGINE"
    assert driver.take(entry, "A", "B") == "NONE"
    (taken,) = driver.entries("B")
    assert (taken.uid, taken.payload, taken.why) == (entry.uid, entry.payload, "crash")
    assert driver.entries("A") == []


def test_an_ended_request_is_not_taken(driver: Driver) -> None:
    entry = driver.queued("A")
    driver.end(entry.uid)
    assert driver.take(entry) == "DROPPED"
    assert driver.entries("A") == driver.entries("B") == []


def test_only_the_holder_of_the_entry_may_fence(driver: Driver) -> None:
    entry = driver.queued("A")
    driver.take(entry, "A", "B")
    (taken,) = driver.entries("B")
    assert driver.fence(entry, "A").outcome == "LOST", "a zombie that wakes before the taker has fenced"
    assert driver.fence(taken, "B").outcome == "OK"
    assert driver.fence(entry, "A").outcome == "LOST"
    assert driver.entries("B") == [taken]


def test_a_fence_shuts_out_the_attempt_before(driver: Driver) -> None:
    entry = driver.queued("A")
    old = driver.fence(entry).attempt
    prev = driver.say(entry, [1])
    driver.take(entry, "A", "B")
    (taken,) = driver.entries("B")
    new = driver.fence(taken, "B")
    assert new.attempt > old and new.said == 1
    (answer,) = driver.append(driver.item(entry, prev, old, [2]))
    assert split_log_id(answer) == (new.attempt, 1)
    assert driver.tokens(entry.uid) == [1]


def test_a_fence_asked_twice_is_one_launch(driver: Driver) -> None:
    entry = driver.queued()
    first = driver.fence(entry, nonce="same")
    assert driver.fence(entry, nonce="same") == first
    assert driver.fence(entry, nonce="other").launches == 2


def test_three_launches_without_a_token_are_poison(driver: Driver) -> None:
    entry = driver.queued()
    assert [driver.fence(entry, why="self").launches for _ in range(3)] == [1, 2, 3]
    assert driver.fence(entry, why="self").outcome == "POISON"


def test_a_token_in_the_log_sets_the_launches_back(driver: Driver) -> None:
    entry = driver.queued()
    for _ in range(3):
        driver.fence(entry, why="self")
    driver.say(entry, [1])
    assert driver.fence(entry, why="self").launches == 1


def test_a_drain_is_not_a_launch(driver: Driver) -> None:
    entry = driver.queued("A")
    assert driver.fence(entry, "A").launches == 1
    for source, target in [("A", "B"), ("B", "A")] * 5:
        (held,) = driver.entries(source)
        assert driver.take(held, source, target, "drain") == "OK"
        (taken,) = driver.entries(target)
        fenced = driver.fence(taken, target)
        assert (fenced.outcome, fenced.launches) == ("OK", 1)


def test_the_first_launch_counts_even_after_a_drain(driver: Driver) -> None:
    entry = driver.queued("A")
    assert driver.take(entry, "A", "B", "drain") == "OK"
    (taken,) = driver.entries("B")
    assert driver.fence(taken, "B").launches == 1
    assert [driver.fence(taken, "B", why="crash").launches for _ in range(2)] == [2, 3]
    assert driver.fence(taken, "B", why="crash").outcome == "POISON"


def test_a_suspect_waits_until_it_is_alone(driver: Driver) -> None:
    entry = driver.queued()
    assert driver.fence(entry, solo=False).outcome == "OK"
    last = driver.last(entry.uid)
    assert driver.fence(entry, why="self", solo=False).outcome == "SUSPECT"
    assert driver.last(entry.uid) == last
    assert driver.fence(entry, why="self", solo=True).outcome == "OK"


def test_what_an_engine_holds(driver: Driver) -> None:
    one, two = driver.queued(), driver.queued()
    assert driver.run(streams.list_held(driver.keys, "A")) == [(e.entry_id, e.uid) for e in (one, two)]
    assert driver.run(streams.read_generate(driver.keys, "A", after=one.entry_id)) == [two]
    assert driver.run(streams.read_generate_entry(driver.keys, "A", one.entry_id)) == one
    assert driver.run(streams.drop_generate(driver.keys, "A", [one.entry_id, b"1-1"])) == 1
    assert driver.run(streams.read_generate_entry(driver.keys, "A", one.entry_id)) is None
    assert driver.run(streams.list_held(driver.keys, "nobody")) == []


def test_a_dead_engine_is_retired_only_when_nothing_of_it_is_left(driver: Driver) -> None:
    entry = driver.queued("A")
    beat = driver.run(control.look(driver.keys, "scheduler"))["A"]
    assert not driver.run(control.retire(driver.keys, "scheduler", "A", beat))
    driver.take(entry, "A", "B")
    assert not driver.run(control.retire(driver.keys, "scheduler", "A", beat + b"?"))
    assert driver.run(control.retire(driver.keys, "scheduler", "A", beat))
    assert set(driver.run(control.look(driver.keys, "scheduler"))) == {"B"}
    driver.opened()
    assert driver.run(driver.move_call(driver.read_one(), "A")) == "NOENGINE"


def test_who_is_pronounced_dead_has_said_nothing_since(driver: Driver) -> None:
    driver.queued("A")
    beat = driver.run(control.look(driver.keys, "scheduler"))["A"]
    assert driver.run(control.pronounce(driver.keys, "scheduler", "A", beat))
    told = driver.run(control.look(driver.keys, "scheduler"))["A"]
    assert msgspec.structs.replace(decode(Heartbeat, told), ended=False) == decode(Heartbeat, beat)
    assert not driver.run(control.pronounce(driver.keys, "scheduler", "A", beat)), "no more what it was"
    assert not driver.run(control.pronounce(driver.keys, "scheduler", "nobody", beat))
    assert set(driver.run(control.look(driver.keys, "scheduler"))) == {"A", "B"}


def test_a_beat_shows_everybody_and_keeps_the_engines_stream(driver: Driver) -> None:
    driver.queued("A")
    driver.redis("PEXPIRE", driver.keys.generate("A"), 5_000)
    seen = driver.beat("A", 7)
    assert set(seen["scheduler"]) == {"A", "B"} and seen["api"] == {}
    assert decode(Heartbeat, seen["scheduler"]["A"]).beat == 7
    assert driver.ttl_ms(driver.keys.generate("A")) > 5_000


# --- tokens ---


def test_two_readers_of_a_shard_both_see_everything_until_it_is_deleted(driver: Driver) -> None:
    keys = driver.keys
    ids = [driver.run(streams.publish_tokens(keys, MODEL, shard, chunk(f"u{shard}"))) for shard in (0, 1, 1)]
    read = streams.read_tokens(keys, MODEL, {0: streams.FIRST, 1: streams.FIRST}, count=10)
    first, second = driver.run(read), driver.run(read)
    assert first == second
    assert [(entry.shard, entry.entry_id) for entry in first] == list(zip((0, 1, 1), ids, strict=True))
    assert decode(StepChunk, first[1].payload).uids == ["u1"]
    assert driver.run(streams.has_tokens_until(keys, MODEL, 1, ids[1]))
    assert driver.run(streams.drop_tokens(keys, MODEL, 1, [ids[1]])) == 1
    assert not driver.run(streams.has_tokens_until(keys, MODEL, 1, ids[1]))
    assert [e.entry_id for e in driver.run(read)] == [ids[0], ids[2]]


def test_a_position_skips_what_was_read(driver: Driver) -> None:
    first, second = (driver.run(streams.publish_tokens(driver.keys, MODEL, 0, chunk("u"))) for _ in range(2))
    entries = driver.run(streams.read_tokens(driver.keys, MODEL, {0: first}, count=10))
    assert [entry.entry_id for entry in entries] == [second]
    assert driver.run(streams.read_tokens(driver.keys, MODEL, {0: second}, count=10, block_ms=10)) == []


def test_backlog_counts_and_ages(driver: Driver) -> None:
    stream = driver.keys.tokens(MODEL, 0)
    assert driver.run(streams.backlog(stream)) == (0, 0.0)
    driver.redis("XADD", stream, f"{int((time.time() - 30) * 1000)}-0", "m", "x")
    driver.run(streams.publish_tokens(driver.keys, MODEL, 0, chunk("u")))
    backlog = driver.run(streams.backlog(stream))
    assert backlog.length == 2 and 25 < backlog.age_s < 60
    assert driver.run(streams.length(stream)) == 2


def test_dead_letters(driver: Driver) -> None:
    for number in range(3):
        driver.run(dead_letters.bury(driver.keys, DeadLetter(f"u{number}", "poison", 3, "scheduler", number)))
    letters = driver.run(dead_letters.list_dead(driver.keys))
    assert [letter.uid for _, letter in letters] == ["u2", "u1", "u0"]
    assert driver.run(dead_letters.drop_dead(driver.keys, [letters[0][0]])) == 1
    assert [letter.uid for _, letter in driver.run(dead_letters.list_dead(driver.keys, count=1))] == ["u1"]


def test_dead_letters_are_capped(driver: Driver) -> None:
    letter = DeadLetter("u", "poison", 3, "scheduler", 0)
    driver.broker.run_many([dead_letters.bury(driver.keys, letter)] * (DEAD_CAP + 500))
    assert driver.run(streams.length(driver.keys.dead)) < DEAD_CAP + 200
