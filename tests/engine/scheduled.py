"""A scheduler and an engine together, without a loop and a broker; the books are checked after every step."""

from collections import deque

from services.scheduler.core.batch import Batch
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.link import Arrival, StepOutput
from services.scheduler.core.ports import Engine, Step
from services.scheduler.core.scheduler import Scheduler
from tests.fakes.link import Heard, Ledger
from tests.scheduler.driver import is_idle


class Scheduled:
    """Runs requests to their end.

    Attributes:
        batches: every step that was launched.
    """

    def __init__(self, engine: Engine, config: SchedulerConfig | None = None, depth: int = 1) -> None:
        self.engine = engine
        self.scheduler = Scheduler(engine.limits, config)
        self.ledger = Ledger()
        self.batches: list[Batch] = []
        self._depth = depth
        self._steps: deque[Step] = deque()

    def add(self, *items: Arrival) -> None:
        """Let requests arrive."""
        for item in items:
            self.ledger.expect(item)
            self.scheduler.add(item)

    def turn(self) -> None:
        """Go round once."""
        batch = self.scheduler.plan()
        if batch is not None:
            self.batches.append(batch)
            self._steps.append(self.engine.launch(batch))
        if len(self._steps) > (self._depth if batch is not None else 0):
            step = self._steps.popleft()
            self._tell(self.scheduler.settle(step.batch, self.engine.wait(step), 1))
        self.scheduler.check()

    def run(self, *items: Arrival) -> list[Heard]:
        """Let requests arrive, and see all that are there to their end; then every page is free or cached."""
        self.add(*items)
        while not is_idle(self.scheduler):
            self.turn()
        pool = self.scheduler.pages.pool
        assert pool.num_free + self.scheduler.pages.cache.num_evictable == pool.num_pages
        return [self.ledger.heard[item.request.uid] for item in items]

    def _tell(self, output: StepOutput | None) -> None:
        if output is not None:
            self.ledger.note(output)
        assert not self.scheduler.take_failures()
