"""The metrics of a scheduler: the table of their names, and the one object that the loop and the link tell.

Owns names, help texts and labels. Gauges are asked for at each scrape, so they cannot freeze at an old value.
Labels come from closed sets; no uid, no text.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client import Gauge

from services.scheduler.core.config import SchedulerStats
from shared.metrics import (
    DEAD_LETTERS,
    HOP_SECONDS,
    LATENCY_BUCKETS,
    SHORT_BUCKETS,
    STREAM_LAG,
    STREAM_LENGTH,
    STREAM_OLDEST_AGE,
    Metric,
    Metrics,
)

Part = Literal["host", "launch", "wait", "device"]
Cause = Literal["doorbell", "audit", "fence", "orphan"]
STREAM: Final = "generate"
ROWS_BUCKETS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)

RUNNING: Final = Metric("millrace_requests_running", "gauge", "Requests with a slot")
WAITING: Final = Metric("millrace_requests_waiting", "gauge", "Requests of this engine without a slot")
QUEUED_TOKENS: Final = Metric("millrace_queued_tokens", "gauge", "Prompt tokens of the waiting requests")
SLOTS: Final = Metric("millrace_slots", "gauge", "Request slots of the engine")
KV_PAGES: Final = Metric("millrace_kv_pages", "gauge", "KV pages by state: free, live, cached", ("state",))
KV_PAGES_CAPACITY: Final = Metric("millrace_kv_pages_capacity", "gauge", "KV pages of the pool")
LINK_PAUSED: Final = Metric(
    "millrace_link_paused", "gauge", "1 while no step is taken: token streams full, or the lease not kept"
)
UNCONFIRMED: Final = Metric(
    "millrace_requests_unconfirmed", "gauge", "Requests computed to their end whose terminal is not in the log yet"
)
LOAD_SECONDS: Final = Metric("millrace_model_load_seconds", "gauge", "Time the model took to load")
CACHE_QUERY_TOKENS: Final = Metric(
    "millrace_prefix_cache_query_tokens_total", "counter", "Prompt tokens looked up in the prefix cache"
)
CACHE_HIT_TOKENS: Final = Metric(
    "millrace_prefix_cache_hit_tokens_total", "counter", "Prompt tokens found in the prefix cache"
)
PREFILL_TOKENS: Final = Metric("millrace_prefill_tokens_total", "counter", "Prompt tokens computed")
GENERATED_TOKENS: Final = Metric("millrace_generated_tokens_total", "counter", "Tokens drawn")
STEPS: Final = Metric("millrace_steps_total", "counter", "Engine steps settled")
STEP_SECONDS: Final = Metric(
    "millrace_step_seconds", "histogram", "Time of a step, as the loop's thread sees it", buckets=SHORT_BUCKETS
)
STEP_PART_SECONDS: Final = Metric(
    "millrace_step_part_seconds",
    "histogram",
    "Time of a step by part: host (planning, settling), launch, wait (for the engine), device",
    ("part",),
    SHORT_BUCKETS,
)
STEP_ROWS: Final = Metric("millrace_step_rows", "histogram", "Requests in a step", buckets=ROWS_BUCKETS)
RETRACTIONS: Final = Metric(
    "millrace_retractions_total", "counter", "Requests put back to the queue because pages ran out"
)
FINISHED: Final = Metric(
    "millrace_engine_requests_finished_total",
    "counter",
    "Requests this engine is done with: stop, length, abort, error, moved (to another engine)",
    ("reason",),
)
ABORTS: Final = Metric(
    "millrace_aborts_total",
    "counter",
    "Requests ended from outside, by what showed it: doorbell, audit, fence, orphan",
    ("cause",),
)
FENCES: Final = Metric(
    "millrace_fences_total",
    "counter",
    "Answers to fences: ok, gone, ended, lost, suspect, poison",
    ("answer",),
)
TAKEOVERS: Final = Metric(
    "millrace_takeovers_total", "counter", "Requests taken from a dead engine or handed over in a drain", ("why",)
)
LOG_RESTARTS: Final = Metric(
    "millrace_log_restarts_total", "counter", "Requests started again from their log, because the broker lost data"
)
QUEUE_SECONDS: Final = Metric(
    "millrace_queue_seconds", "histogram", "From the api's acceptance to this engine's fence", buckets=LATENCY_BUCKETS
)
IO_TURN_SECONDS: Final = Metric(
    "millrace_io_turn_seconds", "histogram", "One pipelined turn of the I/O thread", buckets=SHORT_BUCKETS
)
PUBLISH_SECONDS: Final = Metric(
    "millrace_publish_seconds", "histogram", "From a settled step to the broker's answer", buckets=SHORT_BUCKETS
)

TABLE: Final[tuple[Metric, ...]] = (
    RUNNING, WAITING, QUEUED_TOKENS, SLOTS, KV_PAGES, KV_PAGES_CAPACITY, LINK_PAUSED, UNCONFIRMED, LOAD_SECONDS,
    CACHE_QUERY_TOKENS, CACHE_HIT_TOKENS, PREFILL_TOKENS, GENERATED_TOKENS, STEPS, STEP_SECONDS, STEP_PART_SECONDS,
    STEP_ROWS, RETRACTIONS, FINISHED, ABORTS, FENCES, TAKEOVERS, LOG_RESTARTS, QUEUE_SECONDS, IO_TURN_SECONDS,
    PUBLISH_SECONDS,
)  # fmt: skip
"""Every metric of this service beside the common ones; documentation and dashboards are made from it."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """What the gauges read at a scrape; made by `service` from the loop and the link."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    slots: int = 0
    pages: int = 0
    pages_free: int = 0
    pages_cached: int = 0
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
            for m in (PREFILL_TOKENS, GENERATED_TOKENS, CACHE_QUERY_TOKENS, CACHE_HIT_TOKENS, RETRACTIONS)
        )
        self._followed = (0,) * len(self._following)
        self._steps = metrics.counter(STEPS)
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
        self._stream_length = metrics.gauge(STREAM_LENGTH).labels(STREAM)
        self._stream_lag = metrics.gauge(STREAM_LAG).labels(STREAM)
        self._stream_age = metrics.gauge(STREAM_OLDEST_AGE).labels(STREAM)
        self._hop = metrics.histogram(HOP_SECONDS).labels(STREAM)
        self._queue_seconds = metrics.histogram(QUEUE_SECONDS)
        self._io_turn = metrics.histogram(IO_TURN_SECONDS)
        self._publish = metrics.histogram(PUBLISH_SECONDS)
        for reason in ("stop", "length", "abort", "error", "moved"):
            self._finished.labels(reason)

    def step(self, rows: int, times: StepTimes) -> None:
        """Count one settled step: requests in it, and where its time went."""
        self._steps.inc()
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
        )
        if now == self._followed:
            return
        for counter, value, before in zip(self._following, now, self._followed, strict=True):
            if value > before:
                counter.inc(value - before)
        self._followed = now

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
        self._stream_length.set(entries)
        self._stream_lag.set(waiting)
        self._stream_age.set(oldest_s)

    def read(self, seconds: float) -> None:
        """Note how long an entry was in the own stream before it was read."""
        self._hop.observe(max(0.0, seconds))

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
        )
        for metric, value in values:
            _ask(self._metrics.gauge(metric), read, value)
        pages = self._metrics.gauge(KV_PAGES)
        _ask(pages.labels("free"), read, lambda g: g.pages_free)
        _ask(pages.labels("cached"), read, lambda g: g.pages_cached)
        _ask(pages.labels("live"), read, lambda g: g.pages - g.pages_free - g.pages_cached)

    def loaded(self, seconds: float) -> None:
        """Note how long the model took to load."""
        self._metrics.gauge(LOAD_SECONDS).set(seconds)


def _ask(gauge: Gauge, read: Callable[[], Gauges], value: Callable[[Gauges], float]) -> None:
    gauge.set_function(lambda: value(read()))
