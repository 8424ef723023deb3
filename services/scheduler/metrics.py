"""The metrics of a scheduler: the one object that the loop and the link tell. The names are in `metric_table`.

Gauges are asked for at each scrape, so they cannot freeze at an old value.
Labels come from closed sets; no uid, no text.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client import Gauge

from services.scheduler.core.batch import StepPath
from services.scheduler.core.config import SchedulerStats
from services.scheduler.core.ports import EngineLimits
from services.scheduler.metric_table import (
    ABORTS,
    BAD_ROWS,
    CACHE_HIT_TOKENS,
    CACHE_INFO,
    CACHE_QUERY_TOKENS,
    FENCES,
    FINISHED,
    GENERATED_TOKENS,
    IDLE_SECONDS,
    IO_TURN_SECONDS,
    KV_EVICTED,
    KV_PAGES,
    KV_PAGES_CAPACITY,
    KV_USAGE,
    LAST_STEP,
    LINK_PAUSED,
    LOAD_SECONDS,
    LOG_RESTARTS,
    MODEL_INFO,
    PREFILL_TOKENS,
    PUBLISH_SECONDS,
    QUEUE_SECONDS,
    QUEUED_TOKENS,
    RETRACTIONS,
    RUNNING,
    SLOTS,
    STEP_PART_SECONDS,
    STEP_ROWS,
    STEP_SECONDS,
    STEP_TOKENS,
    STEPS,
    TAKEOVERS,
    UNCONFIRMED,
    WAITING,
)
from services.scheduler.metric_table import (
    TABLE as TABLE,
)
from shared.metrics import (
    DEAD_LETTERS,
    DELIVERIES,
    HOP_SECONDS,
    STAGE_SECONDS,
    Metric,
    Metrics,
    StreamGauges,
)

Part = Literal["host", "launch", "wait", "device"]
Cause = Literal["doorbell", "audit", "fence", "orphan"]
STREAM: Final = "generate"


@dataclass(frozen=True, slots=True)
class Gauges:
    """What the gauges read at a scrape; made by `service` from the loop and the link.

    Attributes:
        pages_reach: pages that a new request could have: free ones, and cached ones that nobody reads.
    """

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    slots: int = 0
    pages: int = 0
    pages_free: int = 0
    pages_live: int = 0
    pages_cached: int = 0
    pages_quarantined: int = 0
    pages_reach: int = 0
    unconfirmed: int = 0
    paused: bool = False


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of the step loop's thread by part, and of the device beside it."""

    host: float = 0.0
    launch: float = 0.0
    wait: float = 0.0
    device: float = 0.0

    def minus(self, other: "StepTimes") -> "StepTimes":
        """Give what has been added since."""
        return StepTimes(
            self.host - other.host, self.launch - other.launch, self.wait - other.wait, self.device - other.device
        )


class SchedulerMetrics:
    """The recorder of one scheduler. Methods are cheap and may be called from any thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._following = tuple(
            metrics.counter(m)
            for m in (
                PREFILL_TOKENS, GENERATED_TOKENS, CACHE_QUERY_TOKENS, CACHE_HIT_TOKENS, RETRACTIONS, KV_EVICTED,
                BAD_ROWS,
            )
        )  # fmt: skip
        self._followed = (0,) * len(self._following)
        steps = metrics.counter(STEPS)
        paths: tuple[StepPath, ...] = ("eager", "decode_graph", "mixed_graph")
        self._steps = {path: steps.labels(path) for path in paths}
        self._step_tokens = metrics.histogram(STEP_TOKENS)
        self._last_step = metrics.gauge(LAST_STEP)
        self._idle = metrics.counter(IDLE_SECONDS)
        self._idle_s = 0.0
        self._step_seconds = metrics.histogram(STEP_SECONDS)
        self._step_rows = metrics.histogram(STEP_ROWS)
        part_seconds = metrics.histogram(STEP_PART_SECONDS)
        parts: tuple[Part, ...] = ("host", "launch", "wait", "device")
        self._parts = {part: part_seconds.labels(part) for part in parts}
        self._finished = metrics.counter(FINISHED)
        self._aborts = metrics.counter(ABORTS)
        self._fences = metrics.counter(FENCES)
        self._takeovers = metrics.counter(TAKEOVERS)
        self._dead_letters = metrics.counter(DEAD_LETTERS)
        self._log_restarts = metrics.counter(LOG_RESTARTS)
        self._stream = StreamGauges(metrics, STREAM)
        deliveries = metrics.counter(DELIVERIES)
        self._first, self._again = deliveries.labels(STREAM, "first"), deliveries.labels(STREAM, "again")
        stages = metrics.histogram(STAGE_SECONDS)
        self._stages = {stage: stages.labels(stage) for stage in ("admit", "prefill", "decode")}
        self._hop = metrics.histogram(HOP_SECONDS).labels(STREAM)
        self._queue_seconds = metrics.histogram(QUEUE_SECONDS)
        self._io_turn = metrics.histogram(IO_TURN_SECONDS)
        self._publish = metrics.histogram(PUBLISH_SECONDS)
        for counter, values in (
            (self._finished, ("stop", "length", "abort", "error", "moved")),
            (self._aborts, ("doorbell", "audit", "fence", "orphan")),
            (self._takeovers, ("crash", "drain")),
            (self._dead_letters, ("poison", "unreadable")),
        ):
            for value in values:
                counter.labels(value)

    def step(self, rows: int, tokens: int, times: StepTimes, path: StepPath = "eager") -> None:
        """Count one settled step: requests and tokens in it, where its time went, and how it ran."""
        self._steps[path].inc()
        self._last_step.set_to_current_time()
        self._step_tokens.observe(tokens)
        self._step_rows.observe(rows)
        self._step_seconds.observe(times.host + times.launch + times.wait)
        self._parts["host"].observe(times.host)
        self._parts["launch"].observe(times.launch)
        self._parts["wait"].observe(times.wait)
        self._parts["device"].observe(times.device)

    def follow(self, stats: SchedulerStats) -> None:
        """Take in the scheduler's own counters, which only grow. One thread calls it."""
        now = (
            stats.prompt_tokens,
            stats.generated_tokens,
            stats.cache_query_tokens,
            stats.cache_hit_tokens,
            stats.retractions,
            stats.evicted_pages,
            stats.bad_rows,
        )
        if now == self._followed:
            return
        for counter, value, before in zip(self._following, now, self._followed, strict=True):
            if value > before:
                counter.inc(value - before)
        self._followed = now

    def idle(self, seconds: float) -> None:
        """Note how long the loop has been without a step in all; it only grows."""
        if seconds > self._idle_s:
            self._idle.inc(seconds - self._idle_s)
            self._idle_s = seconds

    def stage(self, stage: Literal["admit", "prefill", "decode"], ns: int) -> None:
        """Note how long a request was in a stage, in nanoseconds."""
        self._stages[stage].observe(max(0, ns) / 1e9)

    def finished(self, reason: str) -> None:
        """Count a request this engine is done with."""
        self._finished.labels(reason if reason in ("length", "abort", "error", "moved") else "stop").inc()

    def aborted(self, cause: Cause) -> None:
        """Count a request that was ended from outside."""
        self._aborts.labels(cause).inc()
        self._finished.labels("abort").inc()

    def fence(self, answer: str) -> None:
        """Count the answer to a fence."""
        self._fences.labels(answer.lower()).inc()

    def takeover(self, why: Literal["crash", "drain"], count: int = 1) -> None:
        """Count entries taken from a dead engine, or handed over by this one."""
        self._takeovers.labels(why).inc(count)

    def dead_letter(self, reason: Literal["poison", "unreadable"]) -> None:
        """Count a request or entry that was given up."""
        self._dead_letters.labels(reason).inc()

    def backlog(self, entries: int, waiting: int, oldest_s: float) -> None:
        """Note the length of the own stream, how many of it are not fenced, and the age of its oldest entry."""
        self._stream.set(entries, waiting, entries - waiting, oldest_s)

    def read(self, seconds: float, *, again: bool = False) -> None:
        """Note how long an entry was in the own stream before it was read, and whether another engine had it."""
        self._hop.observe(max(0.0, seconds))
        (self._again if again else self._first).inc()

    def log_restart(self) -> None:
        """Count a request that starts again from its log."""
        self._log_restarts.inc()

    def queued(self, seconds: float) -> None:
        """Note how long a request waited from the api to its fence."""
        self._queue_seconds.observe(max(0.0, seconds))

    def io_turn(self, seconds: float) -> None:
        """Note the time of one turn of the I/O thread, its sleep left out."""
        self._io_turn.observe(seconds)

    def published(self, seconds: float) -> None:
        """Note the time from a settled step to the broker's answer."""
        self._publish.observe(max(0.0, seconds))

    def watch(self, read: Callable[[], Gauges]) -> None:
        """Have the gauges read at each scrape; `read` must be quick and safe on any thread."""
        values: tuple[tuple[Metric, Callable[[Gauges], float]], ...] = (
            (RUNNING, lambda g: g.running),
            (WAITING, lambda g: g.waiting),
            (QUEUED_TOKENS, lambda g: g.queued_tokens),
            (SLOTS, lambda g: g.slots),
            (KV_PAGES_CAPACITY, lambda g: g.pages),
            (LINK_PAUSED, lambda g: float(g.paused)),
            (UNCONFIRMED, lambda g: g.unconfirmed),
            (KV_USAGE, lambda g: max(0.0, 1 - g.pages_reach / g.pages) if g.pages else 0.0),
        )
        for metric, value in values:
            _ask(self._metrics.gauge(metric), read, value)
        pages = self._metrics.gauge(KV_PAGES)
        _ask(pages.labels("free"), read, lambda g: g.pages_free)
        _ask(pages.labels("cached"), read, lambda g: g.pages_cached)
        _ask(pages.labels("live"), read, lambda g: g.pages_live)
        _ask(pages.labels("quarantined"), read, lambda g: g.pages_quarantined)

    def loaded(self, seconds: float) -> None:
        """Note how long the model took to load."""
        self._metrics.gauge(LOAD_SECONDS).set(seconds)

    def describe(
        self, limits: EngineLimits, *, model: str, engine: str, device: str, dtype: str, ranks: int, prefix_cache: str
    ) -> None:
        """Say what is served, how, and how the cache is cut."""
        size = str(limits.max_seq_len)
        info = self._metrics.gauge(MODEL_INFO)
        info.labels(model, engine, device, dtype, str(ranks), limits.fingerprint, size).set(1)
        self._metrics.gauge(CACHE_INFO).labels(str(limits.page_size), str(limits.num_pages), prefix_cache).set(1)


def _ask(gauge: Gauge, read: Callable[[], Gauges], value: Callable[[Gauges], float]) -> None:
    gauge.set_function(lambda: value(read()))
