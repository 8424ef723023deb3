"""Step outputs on their way to the token streams: grouping, order, and retries with the same content."""

from typing import Any

import numpy as np
import pytest

from services.scheduler.agenda import Agenda
from services.scheduler.core.batch import RowLogprobs
from services.scheduler.core.link import StepOutput
from services.scheduler.ledger import Held, Ledger
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.outbox import Outbox, make_chunk
from shared.broker.connection import Broker
from shared.broker.streams import FIRST, read_tokens
from shared.errors import BrokerDown
from shared.ids import new_uid, shard_of
from shared.messages import GenerateRequest, LogprobEntry, StepChunk, decode
from shared.metrics import Metrics
from shared.sampling import SamplingParams
from tests.redis_keys import command

MODEL = "tiny"


def output(uids: list[str], first: int = 1, attempt: int = 7, **options: Any) -> StepOutput:
    count = len(uids)
    return StepOutput(
        5, uids, [attempt] * count, [first] * count, options.pop("tokens", list(range(40, 40 + count))), **options
    )


class Stage:
    """An outbox with requests it speaks for."""

    def __init__(self, broker: Broker, uids: list[str], shards: int = 4) -> None:
        self.broker = broker
        self.ledger = Ledger()
        metrics = Metrics("scheduler", "s", MODEL, "0")
        self.registry = metrics.registry
        self.metrics = SchedulerMetrics(metrics)
        self.outbox = Outbox(broker.keys, MODEL, "e1", self.ledger, self.metrics, shards)
        self.shards = shards
        for uid in uids:
            request = GenerateRequest(uid, [1], SamplingParams(max_tokens=9))
            self.ledger.add(Held(uid, uid.encode(), request, "new", shard_of(uid, shards)))
        self.ledger.choose(len(uids))
        for held in list(self.ledger.asked.values()):
            self.ledger.speak(held, 7, 0, 1)

    def send(self, broker: Any = None) -> None:
        agenda = Agenda()
        self.outbox.plan(agenda)
        agenda.run(broker or self.broker)

    def sent(self) -> list[tuple[int, StepChunk]]:
        call = read_tokens(self.broker.keys, MODEL, dict.fromkeys(range(self.shards), FIRST), count=100)
        return [(entry.shard, decode(StepChunk, entry.payload)) for entry in self.broker.run(call)]


class LosesAnswers:
    """A broker whose answers do not arrive, although the calls were made."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def run_many(self, calls: Any) -> Any:
        self._broker.run_many(calls)
        raise BrokerDown("the answer is lost")


def test_a_step_is_one_entry_per_shard_that_has_any_of_its_tokens(broker: Broker) -> None:
    uids = [new_uid() for _ in range(20)]
    stage = Stage(broker, uids)
    stage.outbox.put(output(uids, finishes={3: "stop"}, starts={0: (9, 4)}))
    stage.send()
    sent = stage.sent()
    assert len({shard for shard, _ in sent}) == len(sent)
    found = {uid: (shard, token) for shard, chunk in sent for uid, token in zip(chunk.uids, chunk.tokens, strict=True)}
    assert found == {uid: (shard_of(uid, 4), 40 + i) for i, uid in enumerate(uids)}
    assert all(chunk.counts == [] and chunk.stamp_ns == 5 and chunk.engine == "e1" for _, chunk in sent)
    finishes = {chunk.uids[at]: finish for _, chunk in sent for at, finish in chunk.finishes.items()}
    starts = {chunk.uids[at]: start for _, chunk in sent for at, start in chunk.starts.items()}
    assert finishes == {uids[3]: "stop"} and starts == {uids[0]: (9, 4)}
    assert len(stage.outbox) == 0


def test_the_stages_of_a_request_are_measured_once(broker: Broker) -> None:
    uids = [new_uid(), new_uid()]
    stage = Stage(broker, uids)

    def count(name: str) -> float | None:
        return stage.registry.get_sample_value("millrace_stage_seconds_count", {"stage": name})

    stage.outbox.put(output(uids, starts={0: (9, 4), 1: (9, 0)}))
    stage.outbox.put(output(uids, 2))
    assert (count("prefill"), count("decode")) == (2, 0)
    stage.outbox.put(output(uids, 3, finishes={1: "length"}))
    assert (count("prefill"), count("decode")) == (2, 1)


def test_an_entry_whose_answer_was_lost_is_sent_again_with_the_same_content(broker: Broker) -> None:
    uids = [new_uid() for _ in range(3)]
    stage = Stage(broker, uids, shards=1)
    stage.outbox.put(output(uids, 1))
    with pytest.raises(BrokerDown):
        stage.send(LosesAnswers(broker))
    stage.outbox.put(output(uids, 2))
    held = stage.ledger.get(uids[0])
    assert held is not None and held.sent == 0 and held.unsent == 2
    stage.send()
    chunks = [chunk for _, chunk in stage.sent()]
    assert chunks[0] == chunks[1], "the second copy says the same"
    assert [chunk.firsts[0] for chunk in chunks] == [1, 1, 2]
    assert held.sent == 2 and held.unsent == 0 and held.sent_id


def test_nothing_is_sent_of_requests_that_are_no_longer_ours(broker: Broker) -> None:
    uids = [new_uid() for _ in range(3)]
    stage = Stage(broker, uids, shards=1)
    stage.outbox.put(output(uids))
    gone = stage.ledger.get(uids[1])
    assert gone is not None
    stage.ledger.remove(gone)
    stage.outbox.put(output(uids[:1], 2, attempt=6))  # of an attempt that is over
    stage.send()
    (chunk,) = [chunk for _, chunk in stage.sent()]
    assert chunk.uids == [uids[0], uids[2]] and chunk.tokens == [40, 42]


def test_a_step_that_is_sealed_is_not_changed_by_what_happens_later(broker: Broker) -> None:
    uids = [new_uid() for _ in range(2)]
    stage = Stage(broker, uids, shards=1)
    stage.outbox.put(output(uids))
    with pytest.raises(BrokerDown):
        stage.send(LosesAnswers(broker))
    gone = stage.ledger.get(uids[1])
    assert gone is not None
    stage.ledger.remove(gone)
    stage.send()
    first, second = [chunk for _, chunk in stage.sent()]
    assert first == second


def test_an_end_without_a_token_is_counted_as_none() -> None:
    chunk = make_chunk("e1", output(["a", "b", "c"], tokens=[40, -1, 42], finishes={1: "length"}), [0, 1])
    assert (chunk.tokens, chunk.counts, chunk.finishes) == ([40], [1, 0], {1: "length"})


def test_logprobs_travel_without_bytes() -> None:
    row = RowLogprobs(-0.5, np.array([3, 4], np.int32), np.array([-0.5, -1.5], np.float32))
    chunk = make_chunk("e1", output(["a", "b"], logprobs={1: row}), [1])
    assert chunk.logprobs == {0: [LogprobEntry(41, -0.5, b"", [(3, -0.5, b""), (4, -1.5, b"")])]}


def test_a_pause_begins_when_a_stream_is_too_long_and_ends_well_below(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.scheduler.outbox.TOKENS_PAUSE_LEN", 4)
    monkeypatch.setattr("services.scheduler.outbox.RESUME_LEN", 2)
    stage = Stage(broker, [])
    stream = broker.keys.tokens(MODEL, 0)

    def look(length: int) -> bool:
        broker.run(command("DEL", stream))
        for _ in range(length):
            broker.run(command("XADD", stream, "*", "m", "x"))
        agenda = Agenda()
        stage.outbox.plan_lengths(agenda)
        agenda.run(broker)
        return stage.outbox.full

    assert [look(n) for n in (4, 5, 4, 3, 2, 4, 5)] == [False, True, True, True, False, False, True]


def test_a_pause_begins_when_the_broker_takes_nothing_for_long(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.outbox.TOKENS_PAUSE_LEN", 4)
    uid = new_uid()
    stage = Stage(broker, [uid])
    for index in range(1, 6):
        assert not stage.outbox.full
        stage.outbox.put(output([uid], index))
    assert stage.outbox.full
    stage.send()
    assert not stage.outbox.full
