"""Small parts of the broker: ids in a log, backoff, scripts, and what errors mean."""

import random

import pytest
import redis.exceptions as rx

from shared.broker.backoff import CAP_S, Backoff, Outage
from shared.broker.call import MAX_BLOCK_MS, blocking, call_script, load_script, nothing
from shared.broker.conversation import converse, translate
from shared.broker.log_id import END_ATTEMPT, NO_LOG, LogId, is_end, make_end_id, make_log_id, split_log_id
from shared.errors import BrokerDown, BrokerError, BrokerFull
from shared.keys import Keys


def test_log_ids() -> None:
    assert make_log_id(17, 3) == b"17-3"
    assert split_log_id(make_log_id(17, 3)) == (17, 3)
    assert split_log_id(NO_LOG) == (0, 0)
    assert make_end_id(4) == LogId(b"%d-4" % END_ATTEMPT)
    assert is_end(make_end_id(0)) and not is_end(make_log_id(9, 0)) and not is_end(NO_LOG)
    assert split_log_id(make_log_id(10, 2)) > split_log_id(make_log_id(9, 11))


def test_backoff_grows_with_jitter_up_to_its_cap() -> None:
    backoff = Backoff(chance=random.Random(1))
    pauses = [backoff.next_s() for _ in range(12)]
    assert 0.025 <= pauses[0] <= 0.05
    assert all(CAP_S / 2 <= pause <= CAP_S for pause in pauses[7:])
    assert len(set(pauses)) == len(pauses)
    backoff.reset()
    assert backoff.next_s() <= 0.05


def test_an_outage_is_told_at_once_and_then_every_half_minute() -> None:
    now = iter([0, 1, 29, 31, 40, 45, 70, 76, 80])
    outage = Outage(clock=lambda: float(next(now)))
    assert [outage.tell("refused") for _ in range(5)] == ["refused", "", "", "refused (for 31 s now)", ""]
    assert outage.tell("no route") == "no route"
    assert outage.tell("no route") == ""
    assert outage.tell("no route") == "no route (for 76 s now)"
    outage.end()
    assert outage.tell("no route") == "no route"


def test_a_read_never_waits_for_ever() -> None:
    assert blocking(0) == ()
    assert blocking(10**9) == ("BLOCK", MAX_BLOCK_MS)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (rx.ConnectionError("gone"), BrokerDown),
        (rx.TimeoutError("slow"), BrokerDown),
        (rx.BusyLoadingError("loading"), BrokerDown),
        (rx.ReadOnlyError("You can't write against a read only replica."), BrokerDown),
        (rx.MasterDownError("Link with MASTER is down"), BrokerDown),
        (rx.ResponseError("MISCONF Errors writing to the AOF file"), BrokerDown),
        (rx.ResponseError("UNBLOCKED the stream key no longer exists"), BrokerDown),
        (rx.ResponseError("NOGROUP No such key"), BrokerDown),
        (rx.ResponseError("Error running script (call to f_1): @user_script: 5: -READONLY You can't"), BrokerDown),
        (rx.OutOfMemoryError("command not allowed"), BrokerFull),
        (rx.ResponseError("Error running script (call to f_1): @user_script: 5: -OOM command"), BrokerFull),
        (rx.AuthenticationError("invalid username-password pair"), BrokerError),
        (rx.NoPermissionError("this user has no permissions"), BrokerError),
        (rx.ResponseError("WRONGTYPE Operation against a key"), BrokerError),
        (OSError("no route"), BrokerDown),
    ],
)
def test_what_errors_mean(error: Exception, kind: type[BrokerError]) -> None:
    assert type(translate(error)) is kind


def test_what_cannot_be_remedied_is_not_tried_for_ever() -> None:
    call = call_script(load_script("audit"), ["k"], [1], nothing)
    conversation = converse([call], Keys("k"))
    assert next(conversation) == [call.command]
    asked = 0
    with pytest.raises(BrokerDown):
        while True:
            commands = conversation.send([rx.NoScriptError("gone")] * (1 + (asked > 0)))
            assert commands[0][:2] == ("SCRIPT", "LOAD")
            asked += 1
    assert asked == 3


def test_only_what_is_behind_the_failure_is_repeated() -> None:
    script = call_script(load_script("audit"), ["k"], [1], list)
    conversation = converse([script, script], Keys("k"))
    next(conversation)
    commands = conversation.send([[b"1-0"], rx.NoScriptError("gone")])
    assert len(commands) == 2
    with pytest.raises(StopIteration) as done:
        conversation.send([b"sha", [b"2-0"]])
    assert done.value.value == [[b"1-0"], [b"2-0"]]
