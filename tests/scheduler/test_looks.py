"""How many steps are planned with a request that has ended: two, however late the broker answers."""

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from services.scheduler import broker_link, desk
from services.scheduler.core.batch import Batch
from services.scheduler.core.ports import Step
from services.scheduler.fake_engine import FakeEngineConfig
from shared.broker.call import Call
from shared.broker.connection import Broker
from shared.settings import RedisSettings
from tests.fakes.engines import HostedEngine
from tests.fakes.front import Front, FrontThread
from tests.waiting import eventually

MOST = 2
"""One is planned while the look that misses the end is under way, and one with what that look has seen."""


class Launches:
    """Counts the steps that a hosted engine launches, and whose rows were in them."""

    def __init__(self, engine: HostedEngine) -> None:
        self._engine, self._launch = engine, engine.engine.launch
        self._news = threading.Condition()
        self.total = 0
        self.of: Counter[str] = Counter()
        engine.engine.launch = self._count  # type: ignore[method-assign]

    def _count(self, batch: Batch) -> Step:
        slots = self._engine.scheduler.slots
        with self._news:
            self.total += 1
            self.of.update(slots.req(slot).uid for slot in batch.slots.tolist())
            self._news.notify_all()
        return self._launch(batch)

    def await_more(self, count: int, timeout_s: float) -> bool:
        """Wait until so many more were launched."""
        with self._news:
            until = self.total + count
            return self._news.wait_for(lambda: self.total >= until, timeout_s)


class Late:
    """A broker whose answers come so late that the loop could launch four steps meanwhile."""

    def __init__(self, broker: Broker, launches: Launches) -> None:
        self._broker = broker
        self._launches = launches
        self.keys = broker.keys
        self.outrun = 0

    def run_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        answers = self._broker.run_many(calls)
        self.outrun += self._launches.await_more(4, 0.02)
        return answers


@pytest.mark.parametrize("step_ms", [0.0, 2.0])
def test_two_steps_at_most_are_planned_with_a_request_that_has_ended(
    redis_settings: RedisSettings, broker: Broker, monkeypatch: pytest.MonkeyPatch, step_ms: float
) -> None:
    monkeypatch.setattr(desk, "PATIENCE_S", 60.0)
    front, fake = Front(broker), FakeEngineConfig(base_ms=step_ms, max_seq_len=50_000, num_pages=16_384)
    with HostedEngine(redis_settings, "e1", fake) as engine, Broker(redis_settings) as other:
        launches = Launches(engine)
        late = engine.link._broker = Late(engine.broker, launches)  # type: ignore[assignment]
        uids = [front.open(engine.me, max_tokens=40_000) for _ in range(8)]
        with FrontThread(Front(other)):
            eventually(lambda: engine.link.load.num_running == len(uids), "all are running")
            before = {}
            for uid in uids:
                assert launches.await_more(3, 30.0), "it steps"
                assert front.end(uid) == "OK"
                before[uid] = launches.of[uid]
            eventually(lambda: engine.is_whole, "nothing is held")
    beyond = [launches.of[uid] - count for uid, count in before.items()]
    assert max(beyond) <= MOST, beyond
    assert late.outrun == 0, "the loop waits for a look before it goes on"  # type: ignore[attr-defined]


def test_prompts_that_take_many_steps_do_not_wait_for_a_look(
    redis_settings: RedisSettings, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that draw nothing have nothing to publish; a look follows each of them all the same."""
    monkeypatch.setattr(desk, "PATIENCE_S", 60.0)
    front, fake = Front(broker), FakeEngineConfig(base_ms=1.0, max_step_tokens=64, max_seq_len=8192, max_running=4)
    with HostedEngine(redis_settings, "e1", fake) as engine:
        for name in ("AUDIT_S", "LOOK_S", "DOORBELL_S"):
            monkeypatch.setattr(broker_link, name, 60.0)
        launches = Launches(engine)
        uid = front.open(engine.me, prompt_ids=[1] * 2000, max_tokens=4)
        front.finish(uid)
        assert launches.of[uid] >= 2000 // 64
