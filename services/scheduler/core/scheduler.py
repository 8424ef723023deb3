"""The scheduler: which requests run, in which slots, on which pages; one Batch at a time.

Owns slots, pages and order. It is pure: no clock, no thread, no broker, no tensor; the loop calls it from one
thread. A step is planned with `plan`, launched by the loop, and settled with `settle`, in order; between
the two up to two steps are in flight, and nothing that they refer to is given to anyone else.
"""

from dataclasses import dataclass, field
from typing import Literal

from services.scheduler.core.batch import Batch, StepResult
from services.scheduler.core.link import Arrival, Load, StepOutput
from services.scheduler.core.ports import EngineLimits
from shared.messages import ErrorBody


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Policy of one scheduler.

    Attributes:
        cache: "radix" keeps prefixes of ended requests, "naive" keeps nothing.
        max_prefill_tokens: prompt tokens one step computes at most; the engine's max_step_tokens bounds it too.
        max_gap_ratio: while requests decode, a step with prompt tokens may take this many times the step without
            them, as the fitted cost model sees it; 0 leaves the token budget alone to decide.
    """

    cache: Literal["radix", "naive"] = "radix"
    max_prefill_tokens: int = 2048
    max_gap_ratio: float = 2.5


@dataclass(slots=True)
class SchedulerStats:
    """Counters, read by metrics from another thread; they only grow."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cache_query_tokens: int = 0
    cache_hit_tokens: int = 0
    evicted_pages: int = 0
    retractions: int = 0
    forgotten: int = 0
    bad_rows: int = 0
    finished: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that ended with an error; the scheduler has forgotten it."""

    uid: str
    attempt: int
    error: ErrorBody


class Scheduler:
    """Plans steps for one engine. See the module docstring for the calling order."""

    def __init__(self, limits: EngineLimits, config: SchedulerConfig | None = None) -> None:
        self.stats = SchedulerStats()

    def add(self, arrival: Arrival) -> None:
        """Take a request; what cannot run or has all been said shows up in `take_failures` or `take_endings`."""
        raise NotImplementedError

    def forget(self, uid: str, attempt: int) -> bool:
        """Drop a request of at most this attempt; False when there is none. Nothing more is said of it."""
        raise NotImplementedError

    def plan(self) -> Batch | None:
        """Fill the next step; None when nothing can run before a step in flight is settled, or at all."""
        raise NotImplementedError

    def settle(self, batch: Batch, result: StepResult, stamp_ns: int) -> StepOutput | None:
        """Take in what a step drew, in the order of `plan`; None when it drew nothing to be said."""
        raise NotImplementedError

    def load(self) -> Load:
        """Say how much runs and how much more could."""
        raise NotImplementedError

    def check(self) -> None:
        """Check that slots, pages and locks are whole; AssertionError says which is not. For tests and idle time."""
