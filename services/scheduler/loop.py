"""The step loop: plans, launches and settles steps, and tells the link what they drew.

Owns the order of things and nothing else: what runs is the scheduler's decision, how it is computed the
engine's, and who hears of it the link's. It never waits for the broker.
"""

import threading
from dataclasses import dataclass

from services.scheduler.core.link import Link
from services.scheduler.core.ports import Engine
from services.scheduler.core.scheduler import Scheduler


@dataclass(slots=True)
class LoopStats:
    """Counters of the loop, read by metrics from another thread; all only grow, except `last_step_ms`.

    Attributes:
        steps: settled steps.
        python_s: time in plan, settle and publish, without waiting for the engine.
        wait_s: time waiting for the engine.
        forward_s: device time the engine reported.
        last_step_ms: wall time between the last two settled steps.
    """

    steps: int = 0
    python_s: float = 0.0
    wait_s: float = 0.0
    forward_s: float = 0.0
    last_step_ms: float = 0.0


class StepLoop:
    """Runs one engine until it is stopped. `run` belongs to one thread; `drain` and `stop` may come from any."""

    def __init__(self, engine: Engine, link: Link, scheduler: Scheduler, *, overlap: bool = True) -> None:
        self.stats = LoopStats()

    def run(self) -> None:
        """Step until `stop`; what is in flight is settled and published before it returns.

        Raises:
            EngineFault: the engine is lost.
        """
        raise NotImplementedError

    def drain(self) -> None:
        """Give no slot to anyone new from here on; running requests go on until they end or are forgotten."""

    def stop(self) -> None:
        """Make `run` return after the steps in flight. Requests that still run are dropped without a word."""

    @property
    def drained(self) -> threading.Event:
        """Set while draining and nothing runs any more."""
        raise NotImplementedError
