"""The limits of API keys in the broker: what is counted, what is given back, and what frees itself."""

from typing import Any

import pytest

from shared.broker.connection import Broker
from shared.broker.limits import Claim, Limits, hold, settle, until
from shared.broker.streams import Choice, Opened, open_request
from shared.ids import new_uid
from shared.keys import SLOT_TTL_MS
from shared.messages import Prompt, ReplyHeader, TokenizeRequest
from shared.sampling import SamplingParams
from tests.redis_keys import command
from tests.waiting import eventually

pytestmark = pytest.mark.every_redis


class Caller:
    """Opens requests of one key."""

    def __init__(self, broker: Broker, tenant: str = "team", cap: int | None = 1000) -> None:
        self.broker = broker
        self.tenant = tenant
        self.cap = cap

    def claim(self, need: int = 0, /, **limits: int) -> Claim:
        return Claim(self.tenant, new_uid(), Limits(**limits), need)

    def open(self, claim: Claim) -> Opened:
        request = TokenizeRequest([claim.id], [Prompt(text="hi")], 1, [1], SamplingParams(), "tiny")
        choice = Choice(claim.id, ReplyHeader("api-1"))
        return self.broker.run(open_request(self.broker.keys, request, [choice], cap=self.cap, claim=claim))

    def settle(self, claim: Claim, used: int = 0) -> bool:
        return self.broker.run(settle(self.broker.keys, claim, used))

    def redis(self, *words: str | bytes | int) -> Any:
        return self.broker.run(command(*words))


@pytest.fixture
def caller(broker: Broker) -> Caller:
    return Caller(broker)


def test_places_are_taken_and_given_back(caller: Caller) -> None:
    first, second, third = (caller.claim(concurrency=2) for _ in range(3))
    assert [caller.open(c).outcome for c in (first, second)] == ["OK", "OK"]
    refused = caller.open(third)
    assert (refused.outcome, refused.limited) == ("LIMITED", "concurrency")
    assert refused.levels is not None and refused.levels.running == 2
    assert SLOT_TTL_MS - 10_000 < refused.levels.free_ms <= SLOT_TTL_MS
    assert caller.settle(first) is True
    assert caller.settle(first) is False
    assert caller.open(third).outcome == "OK"
    assert Caller(caller.broker, "other").open(caller.claim(concurrency=2)).outcome == "LIMITED"


def test_what_was_refused_left_nothing(caller: Caller) -> None:
    taken, refused = caller.claim(concurrency=1), caller.claim(concurrency=1)
    caller.open(taken)
    caller.open(refused)
    keys = caller.broker.keys
    assert caller.redis("EXISTS", keys.reply(refused.id)) == 0
    assert caller.redis("XLEN", keys.tokenize("tiny")) == 1
    assert caller.settle(refused) is False


def test_a_full_queue_takes_nothing_of_the_limits(broker: Broker) -> None:
    caller = Caller(broker, cap=0)
    assert caller.open(caller.claim(requests=1)).outcome == "FULL"
    caller.cap = 10
    assert caller.open(caller.claim(requests=1)).outcome == "OK"


def test_a_claim_that_is_sent_twice_counts_once(caller: Caller) -> None:
    claim = caller.claim(10, requests=5, tokens=100)
    opened = caller.open(claim)
    assert opened.levels is not None
    assert caller.open(claim).outcome == "CHANGED"
    left = caller.open(caller.claim(10, requests=5, tokens=100)).levels
    assert left is not None
    assert left.running == 2
    assert 3 <= left.requests < 4
    assert 80 <= left.tokens < 100


def test_a_place_that_nobody_holds_frees_itself(caller: Caller) -> None:
    """The replica is dead: its time runs out. Another's time is lengthened by its hold."""
    dead, held, late = (caller.claim(concurrency=2) for _ in range(3))
    caller.open(dead)
    caller.open(held)
    slots = caller.broker.keys.slots("team")
    for claim in (dead, held):
        caller.redis("ZADD", slots, "XX", 1, claim.id)
    assert caller.broker.run(hold(caller.broker.keys, "team", [held.id])) == 1
    opened = caller.open(late)
    assert opened.outcome == "OK"
    assert opened.levels is not None and opened.levels.running == 2
    assert caller.redis("ZCARD", slots) == 2
    assert caller.redis("PTTL", slots) > 0


def test_the_first_place_to_free_itself_is_told(caller: Caller) -> None:
    """Of a key whose limit was lowered, the first that brings it below the new one."""
    claims = [caller.claim(concurrency=3) for _ in range(3)]
    seconds, _ = caller.redis("TIME")
    for number, claim in enumerate(claims, 1):
        caller.open(claim)
        caller.redis("ZADD", caller.broker.keys.slots("team"), "XX", (int(seconds) + 1000 * number) * 1000, claim.id)
    told = [caller.open(caller.claim(concurrency=most)).levels for most in (3, 2, 1)]
    assert [round(levels.free_ms / 1e6) for levels in told if levels] == [1, 2, 3]


def test_requests_flow_in_again(caller: Caller) -> None:
    for _ in range(3):
        assert caller.open(caller.claim(requests=3)).outcome == "OK"
    refused = caller.open(caller.claim(requests=3))
    assert (refused.outcome, refused.limited) == ("LIMITED", "requests")
    assert refused.levels is not None
    assert 0 < until(3, refused.levels.requests, 1) <= 20
    caller.redis("HINCRBY", caller.broker.keys.bucket("team"), "r@", -20_000)
    assert caller.open(caller.claim(requests=3)).outcome == "OK"
    assert caller.open(caller.claim(requests=3)).outcome == "LIMITED"


def test_tokens_are_reserved_and_then_corrected(caller: Caller) -> None:
    big, small = caller.claim(1000, tokens=1000), caller.claim(200, tokens=1000)
    caller.open(big)
    assert caller.open(small).limited == "tokens"
    caller.settle(big, used=100)
    opened = caller.open(small)
    assert opened.levels is not None
    assert 700 <= opened.levels.tokens <= 800
    caller.settle(small, used=3000)
    refused = caller.open(caller.claim(1, tokens=1000))
    assert refused.levels is not None
    assert refused.levels.tokens < -1900
    assert caller.redis("PTTL", caller.broker.keys.bucket("team")) > 120_000
    assert until(1000, refused.levels.tokens, 1) > 60


def test_a_request_larger_than_a_minute_waits_for_a_full_one(caller: Caller) -> None:
    huge = caller.claim(5000, tokens=1000)
    opened = caller.open(huge)
    assert opened.outcome == "OK"
    assert opened.levels is not None and opened.levels.tokens == 0
    caller.settle(huge, used=0)
    assert caller.open(caller.claim(1000, tokens=1000)).outcome == "OK"


def test_buckets_are_forgotten_when_they_are_full(caller: Caller) -> None:
    claim = caller.claim(10, requests=60_000, tokens=60_000)
    caller.open(claim)
    caller.settle(claim, used=10)
    bucket = caller.broker.keys.bucket("team")
    assert 0 < caller.redis("PTTL", bucket) <= 61_000
    caller.redis("PEXPIRE", bucket, 1)
    eventually(lambda: caller.redis("EXISTS", bucket) == 0, "it is gone")
