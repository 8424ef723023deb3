import contextlib
import threading

import numpy as np
import pytest

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.ports import EngineFault
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.fake_engine import FakeEngine
from services.scheduler.loop import StepLoop
from tests.fakes.link import ScriptedLink, arrival
from tests.scheduler.driver import engine_config, solo


class Running:
    """A loop in a thread of its own, with what the test needs to look at it."""

    def __init__(self, engine=None, *, overlap: bool = True, config: SchedulerConfig | None = None, **sizes) -> None:
        self.engine = engine or FakeEngine(engine_config(**sizes))
        self.scheduler = Scheduler(self.engine.limits, config)
        self.link = ScriptedLink()
        self.loop = StepLoop(self.engine, self.link, self.scheduler, overlap=overlap)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as e:
            self.error = e

    def stop(self) -> None:
        self.loop.stop()
        self.thread.join(10)
        assert not self.thread.is_alive()

    def heard(self, uid: str):
        return self.link.ledger.heard[uid]

    def wait_ended(self, *uids: str) -> None:
        self.link.wait_for(lambda: all(self.heard(uid).ended for uid in uids))

    @property
    def all_settled(self) -> bool:
        """Whether every token that was planned has been computed."""
        slots = self.scheduler.slots
        return bool((slots.settled_len[slots.taken] == slots.planned_len[slots.taken]).all())

    def wait_idle(self) -> None:
        before = self.link.num_idles
        self.link.wait_for(lambda: self.link.num_idles > before)


@contextlib.contextmanager
def running(*args, **kwargs):
    run = Running(*args, **kwargs)
    run.thread.start()
    yield run
    run.stop()
    if run.error is not None:
        raise run.error


@pytest.mark.parametrize("overlap", [False, True])
def test_many_requests_say_what_they_say_alone(overlap):
    items = [
        arrival(f"u{i}", bytes([i]) * (i + 1), max_tokens=5 + i, temperature=float(i % 2), seed=i) for i in range(12)
    ]
    with running(overlap=overlap) as run:
        run.link.put(*items)
        run.wait_ended(*(item.request.uid for item in items))
        for item in items:
            heard = run.heard(item.request.uid)
            assert (heard.tokens, heard.finish) == solo(item)
        assert run.loop.stats.steps > 0 and run.loop.stats.python_s > 0.0
        run.wait_idle()
        run.scheduler.check()


def test_overlap_launches_a_step_before_it_waits_for_the_one_before():
    events = []

    class Watched(FakeEngine):
        def launch(self, batch):
            events.append(("launch", batch.step))
            return super().launch(batch)

        def wait(self, step):
            events.append(("wait", step.batch.step))
            return super().wait(step)

    for overlap in (True, False):
        events.clear()
        with running(Watched(engine_config()), overlap=overlap) as run:
            run.link.put(arrival("a", b"hello", max_tokens=3))
            run.wait_ended("a")
        launches = [("launch", 0), ("launch", 1), ("wait", 0), ("launch", 2), ("wait", 1), ("wait", 2)]
        assert events == (launches if overlap else [(what, step) for step in range(3) for what in ("launch", "wait")])


def test_an_ended_request_says_nothing_more_and_its_place_is_free():
    with running(max_running=1, max_seq_len=100_000, num_pages=30_000) as run:
        run.link.put(arrival("a", b"hello", max_tokens=90_000), arrival("b", b"world"))
        run.link.wait_for(lambda: len(run.heard("a").tokens) >= 3)
        run.link.end("a", 1)
        run.wait_ended("b")
        assert not run.heard("a").ended and len(run.heard("b").tokens) == 8
        run.wait_idle()
        assert run.link.loads[-1].num_running == 0 and run.link.loads[-1].free_slots == 1


def test_a_waiting_request_can_be_ended():
    with running(max_running=1) as run:
        run.link.put(arrival("a", b"hello", max_tokens=200), arrival("b", b"world"), arrival("c", b"again"))
        run.link.wait_for(lambda: len(run.heard("a").tokens) >= 3)
        run.link.end("b", 1)
        run.wait_ended("a", "c")
        assert not run.heard("b").tokens


def test_a_request_is_replaced_by_its_next_attempt_in_mid_stream():
    item = arrival("a", b"hello", max_tokens=200)
    with running() as run:
        run.link.put(item)
        run.link.wait_for(lambda: len(run.heard("a").tokens) >= 5)
        run.link.paused = True
        run.wait_idle()
        said = run.heard("a").tokens[:3]
        run.link.put(arrival("a", b"hello", max_tokens=200, attempt=2, said=said))
        run.link.paused = False
        run.wait_ended("a")
        assert run.heard("a").tokens == solo(item)[0] and run.heard("a").attempts[-1] == 2


def test_refusals_and_bad_rows_are_told_as_errors():
    with running(nan_marker=(1, 2)) as run:
        run.link.put(arrival("big", [5] * 600), arrival("bad", [1, 2, 3]), arrival("good", b"hello"))
        run.wait_ended("big", "bad", "good")
        assert run.heard("big").error.code == "context_length_exceeded"
        assert run.heard("bad").error.status == 500 and run.heard("good").finish == "length"


def test_what_was_all_said_before_a_takeover_ends_at_once():
    with running() as run:
        run.link.put(arrival("a", b"hello", attempt=3, said=[65] * 8))
        run.wait_ended("a")
        assert run.heard("a").finish == "length" and run.loop.stats.steps == 0


def test_paused_steps_wait_and_the_loop_still_beats():
    with running() as run:
        run.link.paused = True
        run.link.put(arrival("a", b"hello"))
        run.wait_idle()
        run.link.loads.clear()
        run.link.wait_for(lambda: len(run.link.loads) >= 2)
        assert not run.heard("a").tokens and run.loop.stats.steps == 0
        run.link.paused = False
        run.wait_ended("a")


def test_a_pause_settles_what_is_in_flight():
    with running() as run:
        run.link.put(arrival("a", b"hello", max_tokens=200))
        run.link.wait_for(lambda: len(run.heard("a").tokens) >= 5)
        run.link.paused = True
        run.wait_idle()
        run.wait_idle()
        assert run.all_settled
        run.link.paused = False
        run.wait_ended("a")
        assert run.heard("a").tokens == solo(arrival("a", b"hello", max_tokens=200))[0]


def test_idle_loop_beats_twice_a_second_and_checks_its_books():
    with running() as run:
        run.link.put(arrival("a", b"hello"))
        run.wait_ended("a")
        run.link.loads.clear()
        run.link.wait_for(lambda: len(run.link.loads) >= 3)
        run.scheduler.slots._free.pop()
        run.link.put(arrival("b", b"hello"))
        run.wait_ended("b")
        run.thread.join(10)
        assert isinstance(run.error, AssertionError) and "slots" in str(run.error)
        run.error = None


def test_stop_settles_and_says_what_is_in_flight():
    run = Running(base_ms=5.0)
    run.thread.start()
    run.link.put(arrival("a", b"hello", max_tokens=200))
    run.link.wait_for(lambda: len(run.heard("a").tokens) >= 3)
    run.stop()
    assert run.error is None and run.all_settled
    assert len(run.heard("a").tokens) == run.loop.stats.steps


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_that_was_scored_in_the_last_step_is_told_before_the_end(overlap):
    """It draws no token, so the step that ends it has no output of its own."""
    run = Running(overlap=overlap)
    run.link.put(arrival("a", b"hello", max_tokens=0, prompt_logprobs=0))
    run.loop.turn()
    run.loop.settle_all()
    assert run.heard("a").finish == "length" and len(run.heard("a").prompts) == 1


def test_a_lost_engine_ends_the_loop():
    class Lost(FakeEngine):
        def wait(self, step):
            raise EngineFault("the device is gone")

    run = Running(Lost(engine_config()))
    run.thread.start()
    run.link.put(arrival("a", b"hello"))
    run.thread.join(10)
    assert isinstance(run.error, EngineFault)


def test_prompt_of_a_newcomer_shares_its_steps_with_those_that_run():
    config = SchedulerConfig(max_prefill_tokens=16)
    with running(config=config, num_pages=1024, max_seq_len=2048, max_step_tokens=512) as run:
        run.link.put(arrival("a", b"hello", max_tokens=1500))
        run.link.wait_for(lambda: len(run.heard("a").tokens) >= 3)
        before = len(run.heard("a").tokens)
        run.link.put(arrival("b", np.arange(640) % 200, max_tokens=1))
        run.wait_ended("b")
        assert len(run.heard("a").tokens) - before >= 640 // 16 - 1
        run.link.end("a", 1)
