import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.claims import Claims
from services.tokenizer.encode import HEAVY_CHARS, Encoded, PromptEncoder
from services.tokenizer.engines import Engines
from services.tokenizer.metrics import TokenizerMetrics
from services.tokenizer.worker import Worker
from shared.broker.call import Call
from shared.broker.connection import Broker
from shared.broker.streams import claim_one, read_queue
from shared.errors import BrokerDown, RequestError
from shared.messages import TokenizeRequest
from shared.metrics import Metrics
from shared.model_files import locate
from shared.settings import RedisSettings
from shared.vocab import load_vocabulary
from tests.redis_keys import command
from tests.tokenizer.requests import MODEL, chat, make_request
from tests.tokenizer.rig import Rig
from tests.waiting import eventually

MakeWorker = Callable[..., Worker]
LONG = "x" * (HEAVY_CHARS + 1)


@pytest.fixture
def rig(broker: Broker) -> Rig:
    return Rig(broker)


@pytest.fixture
def encoder() -> PromptEncoder:
    files = locate("bytes")
    return PromptEncoder(load_vocabulary(files), ChatTemplate(files))


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("tokenizer", "t", MODEL, "0")


@pytest.fixture
def make_worker(rig: Rig, encoder: PromptEncoder, metrics: Metrics) -> Iterator[MakeWorker]:
    with ThreadPoolExecutor(1) as pool:

        def make(
            consumer: str = "tok-1", *, broker: Broker | None = None, encoder: PromptEncoder = encoder, batch: int = 32
        ) -> Worker:
            engines = Engines(MODEL, lambda: rig.engines, 8192)
            recorder = TokenizerMetrics(metrics)
            return Worker(broker or rig.broker, MODEL, consumer, encoder, engines, recorder, batch=batch, pool=pool)

        yield make


@pytest.fixture
def worker(make_worker: MakeWorker) -> Worker:
    return make_worker()


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(name, labels)
    assert found is not None, name
    return found


def test_a_request_reaches_the_engine_and_leaves_the_queue(rig: Rig, worker: Worker, metrics: Metrics) -> None:
    rig.engine("e1")
    uids = rig.send("ab", "c", n=2) + rig.send(chat("hi"), max_tokens=None)
    worker.turn(0)
    found = rig.generated("e1")
    assert [r.uid for r in found] == uids
    assert [r.prompt_ids for r in found[:4]] == [[97, 98]] * 2 + [[99]] * 2
    assert found[4].params.max_tokens == 8192 - len(found[4].prompt_ids)
    assert rig.queue_len() == 0 and rig.pending() == {"tok-1": 0}
    assert value(metrics, "millrace_tokenizer_requests_total", outcome="moved") == 2
    assert value(metrics, "millrace_tokenizer_prompt_length_tokens_count") == 3


def test_a_bad_prompt_ends_every_choice_and_none_of_it_runs(rig: Rig, worker: Worker) -> None:
    rig.engine("e1")
    bad = rig.send("ok", "x" * 9000, n=2)
    good = rig.send("ok")
    worker.turn(0)
    assert [rig.error_of(uid) for uid in bad] == [(400, "context_length_exceeded")] * 4
    assert [r.uid for r in rig.generated("e1")] == good
    assert rig.queue_len() == 0


def test_ids_and_text_are_told_without_an_engine(rig: Rig, worker: Worker, metrics: Metrics) -> None:
    [ids] = rig.send("ab", purpose="tokenize")
    [text] = rig.send([97, 98], purpose="detokenize")
    [bad] = rig.send([10**6], purpose="detokenize")
    waiting = rig.send("waits")
    worker.turn(0)
    assert [entry.token_id for entry in rig.end_of(ids).prompt] == [97, 98]
    assert rig.end_of(text).text == "ab"
    assert rig.error_of(bad)[0] == 400
    assert rig.queue_len() == len(waiting) == worker.num_held
    assert value(metrics, "millrace_tokenizer_requests_total", outcome="told") == 2


def test_ids_and_text_survive_their_tokenizer(rig: Rig, worker: Worker) -> None:
    [uid] = rig.send("ab", purpose="tokenize")
    assert len(rig.broker.run(read_queue(rig.keys, MODEL, "tok-0", count=1))) == 1
    make_claims(rig, worker, {"tok-1"}, {"tok-0": b"beat"}, lambda: 0.0).look(lambda: None)
    assert rig.end_of(uid).prompt_tokens == 2


def test_requests_that_ended_meanwhile_are_not_encoded(rig: Rig, worker: Worker, metrics: Metrics) -> None:
    rig.engine("e1")
    gone = rig.send("a")
    half = rig.send("b", n=2)
    for uid in (gone[0], half[0]):
        rig.abort(uid)
    worker.turn(0)
    assert [r.uid for r in rig.generated("e1")] == [half[1]]
    assert rig.queue_len() == 0 and rig.pending() == {"tok-1": 0}
    assert value(metrics, "millrace_tokenizer_requests_total", outcome="ended") == 1


def test_requests_wait_for_an_engine_and_then_go_in_their_order(rig: Rig, worker: Worker) -> None:
    uids = [rig.send(str(i))[0] for i in range(100)]
    for _ in range(4):
        worker.turn(0)
    assert worker.num_held == 100 and rig.pending() == {"tok-1": 100}
    rig.engine("e1")
    worker.turn(0)
    assert [r.uid for r in rig.generated("e1")] == uids
    assert worker.num_held == 0 and rig.queue_len() == 0


def test_a_request_that_ends_while_it_waits_for_an_engine_is_let_go(rig: Rig, worker: Worker) -> None:
    (uid,) = rig.send("a")
    worker.turn(0)
    rig.abort(uid)
    eventually(lambda: worker.bring_on() or not worker.num_held, "the ended request is let go")
    assert rig.queue_len() == 0


def test_an_engine_that_is_gone_is_passed_over(rig: Rig, worker: Worker, metrics: Metrics) -> None:
    rig.engine("e1")
    rig.engine("e2", num_running=60)
    seen = dict(rig.engines)
    rig.remove_engine("e1")
    rig.engines = seen  # the worker has not noticed yet
    uids = [rig.send(str(i))[0] for i in range(5)]
    worker.turn(0)
    assert [r.uid for r in rig.generated("e2")] == uids and rig.generated("e1") == []
    assert value(metrics, "millrace_tokenizer_no_engine_total") == 5


def test_a_very_long_prompt_does_not_hold_up_the_others(
    rig: Rig, encoder: PromptEncoder, make_worker: MakeWorker
) -> None:
    rig.engine("e1", max_seq_len=1_000_000)
    gate = threading.Event()

    class Slow(PromptEncoder):
        def encode(self, requests: Sequence[TokenizeRequest], limit: int) -> list[Encoded | RequestError]:
            if requests[0].prompts[0].text == LONG:
                assert gate.wait(60)
            return encoder.encode(requests, limit)

    worker = make_worker(encoder=Slow(encoder._vocabulary, encoder._template))
    (long,) = rig.send(LONG)
    shorts = rig.send("a") + rig.send("b")
    worker.turn(0)
    assert [r.uid for r in rig.generated("e1")] == shorts
    assert worker.num_aside == 1 and rig.queue_len() == 1
    worker.recover()
    gate.set()
    eventually(lambda: worker.turn(0) or not worker.num_aside, "the long prompt is encoded")
    assert [r.uid for r in rig.generated("e1")] == [*shorts, long]
    assert rig.queue_len() == 0


def test_one_request_that_cannot_be_encoded_fails_alone(
    rig: Rig, encoder: PromptEncoder, make_worker: MakeWorker
) -> None:
    rig.engine("e1")

    class Fragile(PromptEncoder):
        def encode(self, requests: Sequence[TokenizeRequest], limit: int) -> list[Encoded | RequestError]:
            if any(r.prompts[0].text == "bad" for r in requests):
                raise RuntimeError("already borrowed")
            return encoder.encode(requests, limit)

    worker = make_worker(encoder=Fragile(encoder._vocabulary, encoder._template))
    first, bad, last = (rig.send(text)[0] for text in ("a", "bad", "b"))
    worker.turn(0)
    assert [r.uid for r in rig.generated("e1")] == [first, last]
    assert rig.error_of(bad) == (500, "internal_error")


def test_an_entry_that_cannot_be_read_is_buried_and_ended(rig: Rig, worker: Worker) -> None:
    rig.engine("e1")
    request = make_request("a")
    rig.queue(request)
    stream = rig.keys.tokenize(MODEL)
    rig.broker.run(command("DEL", stream))
    rig.broker.run(command("XADD", stream, "*", "u", request.uids[0], "m", b"\xc1nothing of ours"))
    rig.broker.run(command("XADD", stream, "*", "stranger", "1"))
    (good,) = rig.send("b")
    worker.turn(0)
    assert rig.error_of(request.uids[0]) == (500, "internal_error")
    assert [(d.uid, d.reason) for d in rig.dead_letters()] == [
        ("", "tokenizer_unreadable"),
        (request.uids[0], "tokenizer_unreadable"),
    ]
    assert [r.uid for r in rig.generated("e1")] == [good] and rig.queue_len() == 0


class Flaky(Broker):
    """Loses the answer to a call of the test's choice: the server has done it, the caller does not know."""

    lose: Callable[[Call[object]], bool] = staticmethod(lambda call: False)

    def run_many(self, calls: Sequence[Call[object]]) -> list[object]:
        answers = super().run_many(calls)
        if any(self.lose(call) for call in calls):
            self.lose = lambda call: False
            raise BrokerDown("the answer is lost")
        return answers


@pytest.mark.parametrize("lost", ["XREADGROUP", "move", "end", "discard", "aborted"])
def test_a_lost_answer_loses_and_doubles_nothing(
    rig: Rig, redis_settings: RedisSettings, make_worker: MakeWorker, lost: str
) -> None:
    rig.engine("e1")
    with Flaky(redis_settings) as broker:
        worker = make_worker(broker=broker)
        good = [rig.send(str(i))[0] for i in range(3)]
        bad = [rig.send("x" * 9000)[0] for _ in range(2)]
        over = rig.send("gone")
        rig.abort(over[0])
        broker.lose = lambda call: lost in (call.command[0], call.script and call.script.name)
        with pytest.raises(BrokerDown):
            worker.turn(0)
        worker.recover()
        worker.turn(0)
    assert sorted(r.uid for r in rig.generated("e1")) == sorted(good)
    assert [rig.error_of(uid)[0] for uid in bad] == [400, 400]
    assert rig.queue_len() == 0 and worker.num_held == 0


def make_claims(
    rig: Rig, worker: Worker, living: set[str], dead: dict[str, bytes], clock: Callable[[], float]
) -> Claims:
    return Claims(
        rig.broker, MODEL, "tok-1", worker,
        living=lambda: living, dead=lambda: dead, forgettable=lambda: dead, lease_s=1.5, clock=clock,
    )  # fmt: skip


def test_what_a_dead_tokenizer_left_is_done_and_the_dead_is_forgotten(rig: Rig, worker: Worker) -> None:
    rig.engine("e1")
    uids = [rig.send(str(i))[0] for i in range(5)]
    rig.broker.run(command("HSET", rig.keys.alive("tokenizer"), "tok-0", b"beat"))
    for consumer, count in (("tok-0", 3), ("tok-2", 2)):
        assert len(rig.broker.run(read_queue(rig.keys, MODEL, consumer, count=count))) == count
    claims = make_claims(rig, worker, {"tok-1", "tok-2"}, {"tok-0": b"beat"}, lambda: 0.0)
    claims.look(lambda: None)
    assert [r.uid for r in rig.generated("e1")] == uids[:3]
    assert rig.pending() == {"tok-1": 0, "tok-2": 2}
    assert rig.broker.run(command("HEXISTS", rig.keys.alive("tokenizer"), "tok-0")) == 0


def test_a_consumer_nobody_knows_is_robbed_only_after_a_lease(rig: Rig, worker: Worker) -> None:
    rig.engine("e1")
    (uid,) = rig.send("a")
    rig.broker.run(read_queue(rig.keys, MODEL, "tok-0", count=1))
    now = [0.0]
    claims = make_claims(rig, worker, {"tok-1"}, {}, lambda: now[0])
    for now[0] in (0.0, 1.1):
        claims.look(lambda: None)
        assert rig.generated("e1") == []
    claims.lost()
    now[0] = 2.2
    claims.look(lambda: None)
    assert rig.generated("e1") == []
    now[0] = 4.0
    claims.look(lambda: None)
    assert [r.uid for r in rig.generated("e1")] == [uid]


def test_a_request_that_kills_its_tokenizers_is_given_up(rig: Rig, worker: Worker, metrics: Metrics) -> None:
    rig.engine("e1")
    poison, innocent = rig.send("poison", n=2), rig.send("innocent")
    rig.broker.run(read_queue(rig.keys, MODEL, "dead-0", count=1))
    for k in range(2):
        rig.broker.run(claim_one(rig.keys, MODEL, f"dead-{k}", f"dead-{k + 1}"))
    rig.broker.run(read_queue(rig.keys, MODEL, "dead-2", count=1))
    make_claims(rig, worker, {"tok-1"}, {"dead-2": b""}, lambda: 0.0).look(lambda: None)
    assert [rig.error_of(uid) for uid in poison] == [(500, "internal_error")] * 2
    assert [(d.uid, d.reason, d.tries) for d in rig.dead_letters()] == [(poison[0], "tokenizer_crash", 4)]
    assert [r.uid for r in rig.generated("e1")] == innocent
    assert rig.queue_len() == 0
    assert value(metrics, "millrace_dead_letters_total", reason="crash") == 1


def test_two_tokenizers_with_the_same_entry_move_it_once(rig: Rig, make_worker: MakeWorker) -> None:
    one, two = make_worker("tok-1"), make_worker("tok-2")
    uids = rig.send("a", n=2)
    one.turn(0)
    entry = rig.broker.run(claim_one(rig.keys, MODEL, "tok-1", "tok-2"))
    assert entry is not None
    rig.engine("e1")
    two.take_over(entry)
    one.turn(0)
    assert [r.uid for r in rig.generated("e1")] == uids
    assert one.num_held == two.num_held == 0
