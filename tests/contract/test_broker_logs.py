"""The reply log: every write is a compare-and-append, the end is the end, and the inbox rings with the log."""

import pytest

from shared.broker import control, replies
from shared.broker.connection import Broker
from shared.broker.log_id import END_ATTEMPT, NO_LOG, is_end, make_end_id, make_log_id, split_log_id
from shared.broker.replies import EndEntry, FenceEntry, OpenEntry, TokensEntry
from shared.errors import WireError
from shared.ids import new_uid
from shared.keys import ABORT_TTL_MS, ENDED_TTL_MS, INBOX_TTL_MS, REPLY_HELD_TTL_MS, REPLY_TTL_MS
from shared.messages import Delta, Said, decode
from tests.contract.broker_driver import REPLICA, Driver

pytestmark = pytest.mark.every_redis


@pytest.fixture
def driver(broker: Broker) -> Driver:
    return Driver(broker)


def test_a_whole_life_can_be_read_back(driver: Driver) -> None:
    entry = driver.queued()
    fenced = driver.fence(entry)
    driver.say(entry, [7, 8])
    driver.say(entry, [9], finish="length")
    opened, fence, tokens, end = driver.log(entry.uid)
    assert isinstance(opened, OpenEntry) and opened.header.replica == REPLICA and opened.said is None
    assert isinstance(fence, FenceEntry) and fence.tries == 1 and fence.header.entry == entry.entry_id.decode()
    assert isinstance(tokens, TokensEntry) and tokens.delta.token_ids == [7, 8]
    assert isinstance(end, EndEntry) and end.delta.finish == "length"
    assert [split_log_id(e.log_id) for e in (fence, tokens, end)] == [
        (fenced.attempt, 0),
        (fenced.attempt, 2),
        (END_ATTEMPT, 3),
    ]
    assert driver.entries() == []
    assert driver.run(control.aborted(driver.keys, [entry.uid])) == [entry.uid]


def test_a_gap_is_refused(driver: Driver) -> None:
    entry = driver.queued()
    attempt = driver.fence(entry).attempt
    last = driver.say(entry, [1])
    assert driver.append(driver.item(entry, make_log_id(attempt, 6), attempt, [7])) == [last]
    assert driver.tokens(entry.uid) == [1]


def test_another_grouping_of_the_same_tokens_is_refused(driver: Driver) -> None:
    entry = driver.queued()
    attempt = driver.fence(entry).attempt
    first = driver.say(entry, [1, 2, 3])
    last = driver.say(entry, [4, 5])
    assert driver.append(driver.item(entry, first, attempt, [4, 5, 6])) == [last]
    assert driver.tokens(entry.uid) == [1, 2, 3, 4, 5]


def test_the_last_id_alone_tells_attempt_and_said(driver: Driver) -> None:
    entry = driver.queued()
    driver.fence(entry)
    driver.say(entry, [1, 2])
    again = driver.fence(entry, why="self")
    assert split_log_id(driver.last(entry.uid)) == (again.attempt, 2)
    assert again.said == 2


def test_nothing_follows_the_end(driver: Driver) -> None:
    entry = driver.queued()
    attempt = driver.fence(entry).attempt
    before = driver.say(entry, [1])
    end = driver.say(entry, [], finish="stop")
    assert end == make_end_id(1)
    assert driver.append(driver.item(entry, before, attempt, [2])) == [end]
    assert driver.append(driver.item(entry, before, attempt, [2, 3], finish="length")) == [end]
    assert driver.end(entry.uid) == "ENDED"
    assert driver.fence(entry).outcome == "LOST"


def test_no_script_but_open_creates_a_log(driver: Driver) -> None:
    entry = driver.queued()
    attempt = driver.fence(entry).attempt
    last = driver.say(entry, [1])
    driver.run(replies.delete_logs(driver.keys, [entry.uid]))
    assert driver.append(driver.item(entry, last, attempt, [2])) == [NO_LOG]
    assert driver.append(driver.item(entry, NO_LOG, attempt, [1])) == [NO_LOG]
    assert driver.end(entry.uid) == "GONE"
    assert driver.run(replies.audit(driver.keys, [entry.uid])) == [NO_LOG]
    assert driver.run(replies.sweep(driver.keys, [entry.uid])) == [(NO_LOG, False)]
    assert driver.fence(entry).outcome == "GONE"
    assert driver.log(entry.uid) == []
    assert driver.entries() == [], "a fence on a log that is gone deletes the entry"


def test_attempts_rise_even_above_the_servers_clock(driver: Driver) -> None:
    uid = new_uid()
    far = 10**14
    opened = driver.open(uid, seen=far)
    assert split_log_id(opened.log_ids[0]) == (far + 1, 0)
    entry = driver.read_one()
    driver.run(driver.move_call(entry))
    assert driver.fence(driver.entries()[0]).attempt == far + 2
    again = driver.open(uid, expect=driver.last(uid), cap=None)
    assert split_log_id(again.log_ids[0])[0] == far + 3


def test_log_and_inbox_are_one_write(driver: Driver) -> None:
    one, two = driver.queued(), driver.queued()
    a, b = driver.fence(one), driver.fence(two)
    prev = {e.uid: driver.last(e.uid) for e in (one, two)}
    stale = driver.item(two, make_log_id(1, 0), b.attempt, [5])
    driver.append(driver.item(one, prev[one.uid], a.attempt, [4]), stale)
    (ring,) = driver.rings()
    assert (ring.uid, ring.prev, ring.log_id) == (one.uid, prev[one.uid], make_log_id(a.attempt, 1))
    assert decode(Delta, ring.blob).token_ids == [4]
    assert 0 < driver.ttl_ms(driver.keys.inbox(REPLICA)) <= INBOX_TTL_MS


def test_each_ring_names_what_it_follows(driver: Driver) -> None:
    entry = driver.queued()
    driver.fence(entry)
    for token in (1, 2):
        driver.say(entry, [token])
    driver.end(entry.uid)
    rings = driver.rings()
    assert [b.prev for b in rings[1:]] == [a.log_id for a in rings[:-1]]
    assert is_end(rings[-1].log_id)


def test_the_inbox_position_moves_on(driver: Driver) -> None:
    entry = driver.queued()
    driver.fence(entry)
    driver.say(entry, [1])
    first = driver.run(replies.read_inbox(driver.keys, REPLICA, block_ms=0))
    driver.say(entry, [2])
    second = driver.run(replies.read_inbox(driver.keys, REPLICA, after=first.position, block_ms=0))
    assert [decode(Delta, ring.blob).token_ids for ring in second.rings] == [[2]]
    nothing = driver.run(replies.read_inbox(driver.keys, REPLICA, after=second.position, block_ms=10))
    assert nothing == (second.position, [])


def test_one_flush_rings_several_inboxes(driver: Driver) -> None:
    one, two = driver.queued(), driver.queued()
    items = []
    for entry, replica in ((one, "api-1"), (two, "api-2")):
        attempt = driver.fence(entry).attempt
        items.append(driver.item(entry, driver.last(entry.uid), attempt, [3])._replace(replica=replica))
    driver.append(*items)
    assert [ring.uid for ring in driver.rings("api-1")] == [one.uid]
    assert [ring.uid for ring in driver.rings("api-2")] == [two.uid]


def test_of_two_terminals_the_first_counts(driver: Driver) -> None:
    entry = driver.queued()
    attempt = driver.fence(entry).attempt
    prev = driver.say(entry, [1])
    assert driver.end(entry.uid) == "OK"
    answers = driver.append(driver.item(entry, prev, attempt, [2], finish="stop"))
    assert answers == [make_end_id(1)], "not the id of the item, which would be the end behind two tokens"
    assert driver.tokens(entry.uid) == [1]
    assert len([e for e in driver.log(entry.uid) if isinstance(e, EndEntry)]) == 1


def test_an_engine_ends_only_its_own_attempt(driver: Driver) -> None:
    entry = driver.queued()
    old = driver.fence(entry).attempt
    new = driver.fence(entry, why="self").attempt
    assert driver.end(entry.uid, old) == "FENCED"
    assert driver.end(entry.uid, new) == "OK"


def test_an_end_before_the_request_reaches_an_engine_stops_it(driver: Driver) -> None:
    uid = driver.opened()
    assert driver.end(uid) == "OK"
    assert driver.run(driver.move_call(driver.read_one())) == "OK"
    assert driver.entries() == []


def test_an_end_in_the_engines_queue_is_seen_by_its_fence(driver: Driver) -> None:
    entry = driver.queued()
    driver.end(entry.uid)
    assert driver.fence(entry).outcome == "ENDED"
    assert driver.entries() == []


@pytest.mark.parametrize("by", ["end", "append"])
def test_every_terminal_sets_the_doorbell(driver: Driver, by: str) -> None:
    entry = driver.queued()
    driver.fence(entry)
    if by == "end":
        driver.end(entry.uid)
    else:
        driver.say(entry, [1], finish="stop")
    assert driver.run(control.aborted(driver.keys, ["other", entry.uid])) == [entry.uid]
    assert 0 < driver.ttl_ms(driver.keys.abort(entry.uid)) <= ABORT_TTL_MS


def test_nobody_is_aborted_without_asking(driver: Driver) -> None:
    assert driver.run(control.aborted(driver.keys, [])) == []
    assert driver.run(control.aborted(driver.keys, ["a", "b"])) == []


def test_lives_of_a_log(driver: Driver) -> None:
    entry = driver.queued()
    key = driver.keys.reply(entry.uid)

    def lives_ms() -> int:
        return driver.ttl_ms(key)

    assert REPLY_TTL_MS - 5000 < lives_ms() <= REPLY_TTL_MS
    driver.run(replies.audit(driver.keys, [entry.uid]))
    assert REPLY_TTL_MS < lives_ms() <= REPLY_HELD_TTL_MS
    driver.fence(entry)
    assert lives_ms() <= REPLY_TTL_MS
    driver.end(entry.uid)
    assert lives_ms() <= ENDED_TTL_MS
    driver.run(replies.audit(driver.keys, [entry.uid]))
    driver.run(replies.sweep(driver.keys, [entry.uid]))
    assert lives_ms() <= ENDED_TTL_MS, "nobody lengthens the life of a log that has ended"


@pytest.mark.parametrize("by", ["end", "append"])
def test_a_resumable_log_outlives_its_end(driver: Driver, by: str) -> None:
    entry = driver.queued(resumable_ms=300_000)
    driver.fence(entry)
    if by == "end":
        driver.end(entry.uid)
    else:
        (opened, *_) = driver.log(entry.uid)
        assert isinstance(opened, OpenEntry)
        driver.say(entry, [1], finish="stop", ttl_ms=replies.life_ms(opened.header))
    assert 295_000 < driver.ttl_ms(driver.keys.reply(entry.uid)) <= 300_000


def test_a_sweep_sees_whether_somebody_holds_the_request(driver: Driver) -> None:
    entry = driver.queued()
    last = driver.last(entry.uid)
    assert driver.run(replies.sweep(driver.keys, [entry.uid])) == [(last, False)]
    driver.run(replies.audit(driver.keys, [entry.uid]))
    assert driver.run(replies.sweep(driver.keys, [entry.uid, "nobody"])) == [(last, True), (NO_LOG, False)]
    assert driver.run(replies.sweep(driver.keys, [entry.uid])) == [(last, False)], "only a new audit counts"


def test_opening_again_keeps_what_was_said_and_the_launches(driver: Driver) -> None:
    entry = driver.queued()
    driver.fence(entry)
    driver.fence(entry, why="self")
    said = Said([5, 6], "ab")
    opened = driver.open(entry.uid, expect=driver.last(entry.uid), said=said, cap=None)
    assert split_log_id(opened.log_ids[0])[1] == 2
    (only,) = driver.log(entry.uid)
    assert isinstance(only, OpenEntry)
    assert (only.said, only.tries, only.tokenize_id) == (said, 2, opened.entry)
    assert driver.tokens(entry.uid) == [5, 6]


def test_open_refuses_a_log_that_moved_on(driver: Driver) -> None:
    entry = driver.queued()
    before = driver.last(entry.uid)
    driver.fence(entry)
    state = driver.state()
    answer = driver.open(entry.uid, expect=before)
    assert (answer.outcome, answer.changed, list(answer.log_ids)) == ("CHANGED", 0, [driver.last(entry.uid)])
    assert driver.state() == state


def test_all_choices_are_opened_or_none(driver: Driver) -> None:
    uids = [new_uid() for _ in range(3)]
    driver.open(uids[2])
    state = driver.state()
    answer = driver.open(*uids)
    assert (answer.outcome, answer.changed) == ("CHANGED", 2)
    assert driver.state() == state
    assert driver.open(new_uid(), new_uid(), cap=1).outcome == "FULL"
    assert driver.state() == state
    assert driver.open(new_uid(), cap=None).outcome == "OK", "a repair is never refused for the length of the queue"


def test_reading_from_an_entry_on(driver: Driver) -> None:
    entry = driver.queued()
    driver.fence(entry)
    first = driver.say(entry, [1])
    driver.say(entry, [2])
    since, rest = driver.run(replies.read_log(driver.keys, entry.uid, since=first))
    assert since.log_id == first
    assert isinstance(rest, TokensEntry) and rest.delta.token_ids == [2]
    assert driver.run(replies.read_log(driver.keys, entry.uid, since=make_end_id(0))) == []
    assert len(driver.run(replies.read_log(driver.keys, entry.uid, count=2))) == 2


def test_foreign_bytes_in_a_log_are_named(driver: Driver) -> None:
    uid = new_uid()
    for number, fields in enumerate((["k", "t", "t", b"\xff"], ["k", "z"], ["x", "y"]), start=1):
        driver.redis("DEL", driver.keys.reply(uid))
        driver.redis("XADD", driver.keys.reply(uid), f"{number}-0", *fields)
        with pytest.raises(WireError):
            driver.log(uid)
