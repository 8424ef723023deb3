"""One flush behind another, as detokenizers send them: whose end was seen is not asked for, and yet never guessed."""

import pytest

from shared.broker.append import Flushes, Item
from shared.broker.connection import Broker
from shared.broker.log_id import NO_LOG, LogId, is_next, make_end_id, make_log_id, split_log_id
from shared.broker.streams import GenerateEntry
from tests.contract.broker_driver import Driver
from tests.redis_keys import find_keys

pytestmark = pytest.mark.every_redis


class Writer:
    """One who says token after token, and believes that every one of them is in its log."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.flushes = Flushes(driver.keys)

    def item(self, entry: GenerateEntry, *token_ids: int, prev: LogId = NO_LOG, chain: int | None = None) -> Item:
        """Make the item behind `prev`, or behind the log as it is; by default its end counts as seen."""
        prev = prev or self.driver.last(entry.uid)
        item = self.driver.item(entry, prev, split_log_id(prev)[0], token_ids)
        return item._replace(chain=self.flushes.chain if chain is None else chain)

    def say(self, *items: Item) -> list[LogId]:
        return self.driver.run(self.flushes.append(items))


@pytest.fixture
def driver(broker: Broker) -> Driver:
    return Driver(broker)


@pytest.fixture
def writer(driver: Driver) -> Writer:
    return Writer(driver)


@pytest.fixture
def entry(driver: Driver, writer: Writer) -> GenerateEntry:
    """A request of which one token was said: its end was looked at, and is seen from here on."""
    return begun(driver, writer)


def begun(driver: Driver, writer: Writer) -> GenerateEntry:
    entry = driver.queued()
    assert driver.fence(entry).outcome == "OK"
    writer.say(writer.item(entry, 1, chain=0))
    return entry


def num_looks(driver: Driver) -> int:
    """Count how often the server was asked where a stream ends."""
    stats = driver.redis("INFO", "commandstats").decode()
    found = [line for line in stats.splitlines() if line.startswith("cmdstat_xrevrange:")]
    return int(found[0].partition("calls=")[2].partition(",")[0])


def save(driver: Driver) -> dict[bytes, bytes]:
    return {key: driver.redis("DUMP", key) for key in find_keys(driver.broker)}


def roll_back(driver: Driver, saved: dict[bytes, bytes]) -> None:
    for key in find_keys(driver.broker):
        driver.redis("DEL", key)
    for key, value in saved.items():
        driver.redis("RESTORE", key, 0, value)


def test_where_a_log_ends_is_asked_once(driver: Driver, writer: Writer, entry: GenerateEntry) -> None:
    items = [writer.item(entry, said, prev=make_log_id(attempt(driver, entry), said - 1)) for said in (2, 3, 4)]
    before = num_looks(driver)
    assert [writer.say(item) for item in items] == [[item.log_id] for item in items]
    assert num_looks(driver) == before
    assert driver.tokens(entry.uid) == [1, 2, 3, 4]
    assert [(r.prev, r.log_id, bytes(r.blob)) for r in driver.rings()[-3:]] == [i[1:4] for i in items]


def attempt(driver: Driver, entry: GenerateEntry) -> int:
    return split_log_id(driver.last(entry.uid))[0]


@pytest.mark.parametrize("by", ["another writer", "another engine", "an end", "a removal"])
def test_a_log_that_went_on_otherwise_is_left_as_it_is(
    driver: Driver, writer: Writer, entry: GenerateEntry, by: str
) -> None:
    late = writer.item(entry, 2)
    match by:
        case "another writer":
            driver.say(entry, [7, 8])
        case "another engine":
            assert driver.take(entry) == "OK"
            (moved,) = driver.entries("B")
            assert driver.fence(moved, "B").outcome == "OK"
        case "an end":
            assert driver.end(entry.uid) == "OK"
        case "a removal":
            driver.redis("DEL", driver.keys.reply(entry.uid))
    last, tokens, rings = driver.last(entry.uid), driver.tokens(entry.uid), len(driver.rings())
    assert writer.say(late) == [last]
    assert (driver.last(entry.uid), driver.tokens(entry.uid), len(driver.rings())) == (last, tokens, rings)
    assert writer.flushes.chain == 1, "nothing was lost"


def test_what_another_has_said_already_counts_as_said(driver: Driver, writer: Writer, entry: GenerateEntry) -> None:
    item = writer.item(entry, 2)
    assert driver.append(item) == [item.log_id]
    rings = len(driver.rings())
    assert writer.say(item) == [item.log_id]
    assert driver.tokens(entry.uid) == [1, 2] and len(driver.rings()) == rings


def test_a_flush_behind_lost_data_looks_again(driver: Driver, writer: Writer, entry: GenerateEntry) -> None:
    still = begun(driver, writer)
    saved = save(driver)
    assert writer.say(writer.item(entry, 2)) != [NO_LOG]
    gap, good = writer.item(entry, 3), writer.item(still, 2)
    roll_back(driver, saved)
    last = driver.last(entry.uid)
    assert split_log_id(last)[1] == 1, "its second token is lost"
    assert writer.say(gap, good) == [last, good.log_id]
    assert driver.tokens(entry.uid) == [1] and driver.tokens(still.uid) == [1, 2]
    assert [ring.uid for ring in driver.rings()[-1:]] == [still.uid]
    assert writer.flushes.chain == 2, "nothing counts as seen that was seen before"
    assert writer.say(writer.item(entry, 3, prev=gap.prev, chain=1)) == [last], "also with the next flush"
    assert writer.say(writer.item(entry, 2)) == [make_log_id(split_log_id(last)[0], 2)]


def test_the_second_call_of_a_round_trip_sees_the_loss_too(
    driver: Driver, writer: Writer, entry: GenerateEntry
) -> None:
    other = begun(driver, writer)
    saved = save(driver)
    writer.say(writer.item(entry, 2), writer.item(other, 2))
    gaps = [writer.item(entry, 3), writer.item(other, 3)]
    roll_back(driver, saved)
    lasts = [driver.last(one.uid) for one in (entry, other)]
    answers = driver.broker.run_many([writer.flushes.append([gap]) for gap in gaps])
    assert [last for answer in answers for last in answer] == lasts
    assert driver.tokens(entry.uid) == driver.tokens(other.uid) == [1]


def test_an_answer_that_was_lost_is_given_again(driver: Driver, writer: Writer, entry: GenerateEntry) -> None:
    item = writer.item(entry, 2)
    call = writer.flushes.append([item])
    assert driver.run(call) == [item.log_id]
    rings, chain = len(driver.rings()), writer.flushes.chain
    assert driver.run(call) == [item.log_id]
    assert driver.tokens(entry.uid) == [1, 2] and len(driver.rings()) == rings
    assert writer.flushes.chain > chain, "whoever misses an answer begins anew"


def test_after_a_silence_logs_are_asked_once(driver: Driver, writer: Writer, entry: GenerateEntry) -> None:
    (number,) = [key for key in find_keys(driver.broker) if b":flush:" in key]
    assert 0 < driver.ttl_ms(number.decode()) <= 3_000
    driver.redis("DEL", number)
    item = writer.item(entry, 2)
    assert writer.say(item) == [item.log_id]
    assert writer.flushes.chain == 2


def test_of_a_flush_only_what_is_accepted_rings(driver: Driver, writer: Writer) -> None:
    entries = [begun(driver, writer) for _ in range(5)]
    items = [writer.item(entry, 2) for entry in entries[:4]] + [writer.item(entries[4], 2, 3)]
    for wrong in (1, 3):
        driver.say(entries[wrong], [7])
        driver.say(entries[wrong], [8])
    before = len(driver.rings())
    answers = writer.say(*items)
    assert [answer == item.log_id for answer, item in zip(answers, items, strict=True)] == [1, 0, 1, 0, 1]
    assert [(r.uid, r.prev, r.log_id, bytes(r.blob)) for r in driver.rings()[before:]] == [
        items[place][:4] for place in (0, 2, 4)
    ]
    assert writer.say(items[1], items[3]) == [answers[1], answers[3]]
    assert len(driver.rings()) == before + 3, "nothing rings where nothing is accepted"


def test_an_id_follows_by_its_parts() -> None:
    assert is_next(make_log_id(17, 9), make_log_id(17, 10))
    assert not is_next(make_log_id(17, 9), make_log_id(17, 11))
    assert not is_next(make_log_id(17, 9), make_log_id(17, 9))
    assert not is_next(make_log_id(1, 9), make_log_id(17, 10))
    assert not is_next(make_log_id(17, 9), make_end_id(10))
    assert not is_next(NO_LOG, make_log_id(17, 1))
