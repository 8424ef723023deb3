"""From an entry of the own stream to an arrival: order, how far ahead fences go, and what was said before."""

from services.scheduler.agenda import Agenda
from services.scheduler.desk import AHEAD, Desk
from services.scheduler.endings import Endings
from services.scheduler.fake_engine import FakeEngineConfig
from services.scheduler.inbox import Inbox, decode_entries
from services.scheduler.ledger import Held, Ledger
from services.scheduler.metrics import SchedulerMetrics
from shared.broker import control, replies, streams
from shared.broker.connection import Broker
from shared.broker.replies import FenceEntry
from shared.broker.streams import GenerateEntry
from shared.messages import GenerateRequest, Heartbeat, decode, encode
from shared.metrics import Metrics
from shared.sampling import SamplingParams
from shared.settings import RedisSettings
from tests.fakes.engines import HostedEngine
from tests.fakes.front import Front
from tests.waiting import eventually

ONE_SLOT = FakeEngineConfig(base_ms=2.0, max_running=1)


def test_the_urgent_are_launched_before_those_that_came_earlier(redis_settings: RedisSettings, broker: Broker) -> None:
    front = Front(broker)
    with HostedEngine(redis_settings, "e1", ONE_SLOT) as engine:
        first = front.open("e1", max_tokens=600)
        front.until(lambda: front.said(first), "the slot is taken")
        uids = [front.open("e1", max_tokens=3, priority=-i) for i in range(8)]
        eventually(lambda: engine.link.num_waiting == 8, "eight wait")
        front.finish(first, *uids)
        order = sorted(range(8), key=lambda i: front.reply(uids[i]).attempts[0])
        # Who was fenced ahead while the slot was taken keeps its place; all others go by priority.
        assert order[AHEAD:] == sorted(order[AHEAD:], reverse=True)


def test_only_a_few_are_fenced_beyond_the_free_slots(redis_settings: RedisSettings, broker: Broker) -> None:
    front = Front(broker)
    with HostedEngine(redis_settings, "e1", ONE_SLOT):
        first = front.open("e1", max_tokens=800)
        front.until(lambda: front.said(first), "the slot is taken")
        uids = [front.open("e1", max_tokens=3) for _ in range(8)]
        front.until(lambda: front.said(first) > 100, "it runs on")
        fenced = [uid for uid in uids if front.reply(uid).attempts]
        assert len(fenced) <= AHEAD
        ends = front.finish(first, *uids)
        assert all(reply.finish == "length" and reply.tries == [1] for reply in ends)


def test_a_fence_tells_detokenizers_what_stands_before_the_first_token(
    redis_settings: RedisSettings, broker: Broker
) -> None:
    front = Front(broker)
    with HostedEngine(redis_settings, "e1"):
        prompt = list(range(100))
        uid = front.open("e1", prompt_ids=prompt)
        (reply,) = front.finish(uid)
        (fence,) = [entry for entry in broker.run(replies.read_log(front.keys, uid)) if isinstance(entry, FenceEntry)]
        assert fence.header.engine == "e1" and fence.header.entry.encode() == reply.entry_id
        assert fence.header.prompt_tokens == 100
        assert fence.header.prompt_tail == prompt[-16:]


def test_what_was_told_before_a_repair_is_computed_on(redis_settings: RedisSettings, broker: Broker) -> None:
    front = Front(broker)
    with HostedEngine(redis_settings, "e1") as engine:
        (calm,) = front.finish(front.open("e1", max_tokens=30))
        uid = front.open(None, max_tokens=30)
        broker.run(replies.delete_logs(front.keys, [uid]))
        front.drop_queue()
        front.open_again(uid, "e1", calm.tokens[:12], max_tokens=30)
        (reply,) = front.finish(uid)
        assert reply.tokens == calm.tokens
        assert engine.counter("millrace_fences_total", answer="ok") == 2


def test_payloads_that_are_no_request_or_anothers_are_told_apart() -> None:
    request = GenerateRequest("u1", [1], SamplingParams())
    entries = [
        GenerateEntry(b"1-0", "u1", encode(request), "new"),
        GenerateEntry(b"2-0", "u2", encode(request), "new"),
        GenerateEntry(b"3-0", "u3", b"\x93", "new"),
    ]
    assert [found for _, found in decode_entries(entries).entries] == [request, None, None]


def test_an_entry_that_was_read_twice_is_not_its_own_rival(redis_settings: RedisSettings, broker: Broker) -> None:
    """Its uid ran here under an older entry when it was read; then that one was dropped, and it was read again."""
    front, ledger, desk = Front(broker), Ledger(), Desk()
    metrics = SchedulerMetrics(Metrics("scheduler", "e1", "tiny", "0"))
    endings = Endings(front.keys, "e1", ledger, desk, metrics, False)
    inbox = Inbox(front.keys, "e1", ledger, desk, endings, metrics, 4)
    broker.run(control.beat_and_look(front.keys, "scheduler", "e1", Heartbeat(1, "e1"), ["scheduler"]))
    uid = front.open("e1")
    (entry,) = broker.run(streams.read_generate(front.keys, "e1"))
    running = Held(uid, b"1-0", decode(GenerateRequest, entry.payload), "new", 0)
    ledger.add(running)
    ledger.choose(1)
    ledger.speak(running, 1, 0, 1)
    inbox.take_in(decode_entries([entry]))
    ledger.remove(running)
    inbox.take_in(decode_entries([entry]))
    agenda = Agenda()
    inbox.plan(agenda)
    agenda.run(broker)
    held = ledger.get(uid)
    assert held is not None and held.entry == entry.entry_id
    assert not endings, "nothing is to be deleted"
