"""The step loop: plans, launches and settles steps, and tells the link what they drew.

Owns the order of things and nothing else: what runs is the scheduler's decision, how it is computed the engine's,
and who hears of it the link's. It waits for the broker only where a step takes less time than a round trip.

With overlap, step n + 1 is planned and launched while step n runs, and n is settled while n + 1 runs:

    host     plan 1  launch 1 | plan 2  launch 2  settle 1  publish 1 | plan 3  launch 3  settle 2  publish 2
    device            [------- step 1 -------][------- step 2 -------][-------

Without it every step is settled before the next one is planned.

Rows that must follow a grammar draw behind a mask, which the tokens of the step before decide. So a step with such
rows is told its masks ("guided") as soon as every step before it is settled, while the device computes it.
"""

import threading
import time
from collections import deque
from dataclasses import dataclass

from services.scheduler.core.batch import StepPath
from services.scheduler.core.link import Link, StepOutput
from services.scheduler.core.ports import Engine, Step
from services.scheduler.core.scheduler import Scheduler

COMPILE_IDLE_S = 0.002
"""... and at least this often while a grammar is being compiled."""

IDLE_S = 0.5
"""The loop beats at least this often while nothing runs."""

RATE_WINDOW_S = 1.0


@dataclass(slots=True)
class LoopStats:
    """Counters of the loop, read by other threads; all but the last four only grow.

    Attributes:
        steps: settled steps.
        python_s: time in taking, planning, settling and publishing.
        launch_s: time in the engine's `launch`.
        wait_s: time waiting for the engine.
        forward_s: device time as the engine told it.
        idle_s: time in which no step could run.
        rows, tokens, path: of the step that was settled last.
        busy_since: monotonic time since when the loop has been in a call of the engine; 0.0 while it is in none.
    """

    steps: int = 0
    python_s: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0
    forward_s: float = 0.0
    idle_s: float = 0.0
    rows: int = 0
    tokens: int = 0
    path: StepPath = "eager"
    busy_since: float = 0.0


class StepLoop:
    """Runs one engine until it is stopped. `run` belongs to one thread; `stop` may come from any."""

    def __init__(self, engine: Engine, link: Link, scheduler: Scheduler, *, overlap: bool = True) -> None:
        self.stats = LoopStats()
        self._engine = engine
        self._link = link
        self._scheduler = scheduler
        self._depth = 1 if overlap else 0
        self._launched: deque[Step] = deque()
        self._guided_step = -1
        self._stopping = threading.Event()
        self._rate = _Rate()
        self._was_checked = True

    def run(self) -> None:
        """Step until `stop`; what is in flight is settled and published before it returns.

        Raises:
            EngineFault: the engine is lost.
        """
        while not self._stopping.is_set():
            self.turn()
        self.settle_all()

    def settle_all(self) -> None:
        """Settle and publish what is in flight, after taking in what is new.

        Raises:
            EngineFault: the engine is lost.
        """
        self._take()
        while self._launched:
            self._settle()

    def stop(self) -> None:
        """Make `run` return after the steps in flight. Requests that still run are dropped without a word."""
        self._stopping.set()

    def turn(self) -> None:
        """Go round once: take what is new, launch a step if there is one to run, settle the oldest if it is due.

        Raises:
            EngineFault: the engine is lost.
        """
        began, waited = time.perf_counter(), self.stats.wait_s + self.stats.launch_s + self.stats.idle_s
        if not self._link.paused:
            self.stats.idle_s += self._link.await_look()
        self._take()
        batch = None if self._link.paused else self._scheduler.plan()
        if batch is not None:
            self._link.planned()
            self._was_checked = False
            self.stats.busy_since = time.monotonic()
            at = time.perf_counter()
            self._launched.append(self._engine.launch(batch))
            self.stats.launch_s += time.perf_counter() - at
            self.stats.busy_since = 0.0
            self._guide_oldest()
        settled = len(self._launched) > (self._depth if batch is not None else 0)
        if settled:
            self._settle()
        self._link.report(self._scheduler.load(self._rate.per_s()))
        waited = self.stats.wait_s + self.stats.launch_s + self.stats.idle_s - waited
        self.stats.python_s += time.perf_counter() - began - waited
        if not settled and batch is None:
            self._rest()

    def _take(self) -> None:
        """Take in what is new: endings first, as an arrival may replace what they end."""
        scheduler, link = self._scheduler, self._link
        for uid, attempt in link.endings():
            scheduler.forget(uid, attempt)
        for arrival in link.arrivals():
            scheduler.add(arrival)
        if scheduler.guides.num_compiling:
            scheduler.take_compiled()
        self._tell(scheduler.take_endings(time.time_ns()))

    def _settle(self) -> None:
        """Wait for the oldest step and say what it drew."""
        step = self._launched.popleft()
        at = time.perf_counter()
        self.stats.busy_since = time.monotonic()
        result = self._engine.wait(step)
        self.stats.busy_since = 0.0
        self.stats.wait_s += time.perf_counter() - at
        self.stats.forward_s += result.forward_ms / 1e3
        self.stats.rows, self.stats.tokens = step.batch.num_rows, len(step.batch.input_ids)
        self.stats.path = result.path
        self.stats.steps += 1
        output = self._scheduler.settle(step.batch, result, time.time_ns())
        self._guide_oldest()
        self._tell(output)
        self._tell(self._scheduler.take_endings(time.time_ns()))

    def _guide_oldest(self) -> None:
        """Say what the guided rows of the oldest step may draw, once: nothing is unsettled before it."""
        if not self._launched:
            return
        step = self._launched[0]
        if len(step.batch.guided) and step.batch.step != self._guided_step:
            self._guided_step = step.batch.step
            self._engine.guide(step, self._scheduler.masks(step.batch))

    def _tell(self, output: StepOutput | None) -> None:
        if output is not None:
            self._rate.add(len(output.tokens))
            self._link.publish(output)
        for failure in self._scheduler.take_failures():
            self._link.fail(failure.uid, failure.attempt, failure.error)

    def _rest(self) -> None:
        """Nothing can run: check the books once, when it has been quiet for a while, and sleep until there is news."""
        self._engine.check()
        began = time.monotonic()
        self._link.idle(COMPILE_IDLE_S if self._scheduler.guides.num_compiling else IDLE_S)
        self.stats.idle_s += time.monotonic() - began
        if not self._was_checked and time.monotonic() - began >= IDLE_S:
            self._scheduler.check()
            self._was_checked = True


class _Rate:
    """Tokens per second over the last full window."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._count = 0
        self._rate = 0.0

    def add(self, num: int) -> None:
        self._count += num

    def per_s(self) -> float:
        elapsed = time.monotonic() - self._began
        if elapsed >= RATE_WINDOW_S:
            self._rate = self._count / elapsed
            self._began += elapsed
            self._count = 0
        return self._rate
