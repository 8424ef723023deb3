"""The record of held requests: order, suspects, and what an audit makes of a log."""

from services.scheduler.ledger import Held, Ledger, Phase
from shared.messages import GenerateRequest
from shared.sampling import SamplingParams


def held(uid: str, *, priority: int = 0, tenant: str = "", arrival_ms: int = 0, why: str = "new") -> Held:
    request = GenerateRequest(
        uid, [1, 2, 3], SamplingParams(max_tokens=8), tenant=tenant, priority=priority, arrival_ms=arrival_ms
    )
    return Held(uid, f"1-{uid}".encode(), request, why, shard=0)  # type: ignore[arg-type]


def with_waiting(*uids: str) -> Ledger:
    ledger = Ledger()
    for i, uid in enumerate(uids):
        ledger.add(held(uid, arrival_ms=i))
    return ledger


def asked(ledger: Ledger, room: int) -> list[str]:
    ledger.choose(room)
    return list(ledger.asked)


def test_requests_are_fenced_in_the_waiting_order_and_no_more_than_there_is_room() -> None:
    ledger = with_waiting("c", "a", "b")
    ledger.add(held("urgent", priority=-1, arrival_ms=9))
    assert asked(ledger, 0) == []
    assert asked(ledger, 3) == ["urgent", "c", "a"]
    assert asked(ledger, 3) == ["urgent", "c", "a"], "nobody is chosen before the fences are answered"
    assert ledger.num_waiting == 4 and ledger.waiting_tokens == 12


def test_a_fenced_request_is_live_and_counts_what_was_said() -> None:
    ledger = with_waiting("a")
    ledger.choose(1)
    (one,) = ledger.asked.values()
    version = ledger.version
    ledger.speak(one, attempt=70, said=4, launches=1)
    assert (one.phase, one.base, one.drawn, one.sent) == (Phase.LIVE, 4, 4, 4)
    assert ledger.version != version
    assert ledger.speaking("a", 70) is one and ledger.speaking("a", 69) is None
    assert not ledger.asked and not ledger.num_waiting and not ledger.waiting_tokens


def test_a_suspect_is_launched_alone_and_holds_back_everybody_until_it_has_a_token_in_the_log() -> None:
    ledger = with_waiting("a", "s", "b")
    ledger.choose(2)
    a, s = ledger.asked.values()
    assert not ledger.solo
    ledger.speak(a, 1, 0, 1)
    ledger.refuse(s)
    assert asked(ledger, 9) == [], "a is in its first launch"
    ledger.draw(a, 1)
    assert asked(ledger, 9) == ["s"] and ledger.solo
    ledger.speak(s, 2, 0, 2)
    ledger.draw(s, 1)
    assert asked(ledger, 9) == [], "its token is not in the log"
    ledger.confirm(s, 1)
    assert asked(ledger, 9) == ["b"]


def test_only_one_that_is_alone_may_be_launched_although_it_is_a_suspect() -> None:
    ledger = with_waiting("a", "b")
    assert asked(ledger, 1) == ["a"] and ledger.solo
    ledger.speak(ledger.asked["a"], 1, 0, 1)
    assert asked(ledger, 1) == ["b"] and not ledger.solo


def test_a_suspect_that_leaves_lets_the_others_in() -> None:
    ledger = with_waiting("s", "b")
    ledger.choose(1)
    (s,) = ledger.asked.values()
    ledger.speak(s, 1, 0, 3)
    assert asked(ledger, 1) == []
    ledger.remove(s)
    assert asked(ledger, 1) == ["b"]


def test_a_log_is_judged_by_attempt_and_by_what_was_sent() -> None:
    one = held("a")
    ledger = Ledger()
    ledger.add(one)
    ledger.choose(1)
    ledger.speak(one, attempt=70, said=2, launches=1)
    assert one.judge(71, 2) == "moved"
    assert one.judge(69, 2) == "restart"
    assert one.judge(70, 2) == "keep"
    ledger.draw(one, 5)
    ledger.finish(one)
    assert one.judge(70, 2) == "keep", "nothing of it has been sent"
    one.unsent, one.sent, one.sent_id = 0, 5, b"9-0"
    assert one.judge(70, 4) == "behind"
    assert one.judge(70, 5) == "behind", "its terminal is missing"
    one.phase = Phase.LIVE
    assert one.judge(70, 5) == "keep"


def test_a_request_that_starts_again_keeps_its_entry_and_forgets_what_it_sent() -> None:
    ledger = with_waiting("a")
    ledger.choose(1)
    one = ledger.asked["a"]
    one.nonce = "n1"
    ledger.speak(one, 70, 0, 1)
    ledger.draw(one, 3)
    ledger.finish(one)
    assert ledger.num_finished == 1
    ledger.requeue(one)
    assert (one.why, one.nonce, one.unsent, one.phase) == ("self", "", 0, Phase.WAITING)
    assert ledger.by_entry(one.entry) is one and ledger.num_finished == 0
    assert asked(ledger, 1) == ["a"]
