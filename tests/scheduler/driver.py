"""Drives a scheduler and a fake engine by hand, without a loop or a clock, checking the books after every move."""

import functools
from collections import deque

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.link import Arrival
from services.scheduler.core.ports import EngineLimits
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.fake_engine import FakeEngine, FakeEngineConfig
from shared.sampling import SamplingParams
from tests.fakes.link import Ledger, arrival


def engine_config(**changes) -> FakeEngineConfig:
    sizes = {"num_pages": 64, "page_size": 4, "max_running": 4, "max_seq_len": 512, "max_step_tokens": 512}
    return FakeEngineConfig(**{"base_ms": 0.0, **sizes, **changes})


def limits(**changes) -> EngineLimits:
    return FakeEngine(engine_config(**changes)).limits


def is_idle(scheduler: Scheduler) -> bool:
    """Whether nothing runs, is ready or is in flight: a slot of a step in flight is taken, or held back."""
    return scheduler.slots.num_free == scheduler.slots.num_slots and not scheduler.load().num_ready


class Driver:
    """One scheduler on one fake engine; `depth` 1 plans a step before the one before it is settled."""

    def __init__(
        self, engine: FakeEngineConfig, config: SchedulerConfig | None = None, depth: int = 1, grammars=None
    ) -> None:
        self.engine = FakeEngine(engine, crash=lambda: None)
        self.scheduler = Scheduler(self.engine.limits, config, grammars)
        self.ledger = Ledger()
        self.depth = depth
        self.steps: deque = deque()
        self.batches: list = []
        self.guided_step = -1

    def add(self, *arrivals: Arrival) -> None:
        for item in arrivals:
            self.ledger.expect(item)
            self.scheduler.add(item)
        self._tell(self.scheduler.take_endings(1))

    def forget(self, uid: str, attempt: int = 1) -> bool:
        known = self.scheduler.forget(uid, attempt)
        if known:
            self.ledger.heard[uid].forgotten = True
        self.scheduler.check()
        return known

    def turn(self) -> bool:
        """Go round once; False when there was nothing to do."""
        self.scheduler.take_compiled()
        self._tell(self.scheduler.take_endings(1))
        retractions = self.scheduler.stats.retractions
        batch = self.scheduler.plan()
        self.scheduler.check()
        assert not self.steps or self.scheduler.stats.retractions == retractions, "retracted with a token under way"
        if batch is not None:
            self.batches.append(batch)
            self.steps.append(self.engine.launch(batch))
            self.guide()
        if len(self.steps) > (self.depth if batch is not None else 0):
            self.settle()
        elif batch is None:
            return False
        return True

    def settle(self) -> None:
        step = self.steps.popleft()
        result = self.engine.wait(step)
        self._tell(self.scheduler.settle(step.batch, result, 1))
        self.guide()
        self.scheduler.check()
        self._tell(self.scheduler.take_endings(1))

    def guide(self) -> None:
        """Give the oldest step its masks, as the loop does."""
        if self.steps and len(self.steps[0].batch.guided) and self.steps[0].batch.step != self.guided_step:
            step = self.steps[0]
            self.guided_step = step.batch.step
            self.engine.guide(step, self.scheduler.masks(step.batch))

    def run(self, max_turns: int = 20_000) -> None:
        for _ in range(max_turns):
            if not self.turn():
                assert is_idle(self.scheduler), "nothing runs, but not everything has ended"
                return
        raise AssertionError("no end")

    def tokens(self, uid: str) -> list[int]:
        return self.ledger.heard[uid].tokens

    def _tell(self, output) -> None:
        if output is not None:
            self.ledger.note(output)
        for failure in self.scheduler.take_failures():
            self.ledger.fail(failure.uid, failure.error)


@functools.cache
def _solo(prompt: tuple[int, ...], params: bytes, eos_every: int) -> tuple[tuple[int, ...], str | None]:
    import msgspec

    options = msgspec.structs.asdict(msgspec.msgpack.decode(params, type=SamplingParams))
    config = engine_config(page_size=1, num_pages=2048, max_running=1, max_seq_len=2048, eos_every=eos_every)
    driver = Driver(config, SchedulerConfig(cache="naive"), depth=0)
    driver.add(arrival("solo", list(prompt), **options))
    driver.run()
    heard = driver.ledger.heard["solo"]
    return tuple(heard.tokens), heard.finish


def solo(item: Arrival, eos_every: int = 0) -> tuple[list[int], str | None]:
    """What a request says when it runs alone, without cache, chunks or overlap, from its first token."""
    import msgspec

    tokens, finish = _solo(tuple(item.request.prompt_ids), msgspec.msgpack.encode(item.request.params), eos_every)
    return list(tokens), finish
