"""The metrics of a tokenizer: the table of their names, and the one object that the worker tells.

Labels come from closed sets; no uid, no text.
"""

from collections.abc import Callable
from typing import Final, Literal

from shared.broker.streams import Backlog
from shared.metrics import (
    DEAD_LETTERS,
    DELIVERIES,
    HOP_SECONDS,
    SHORT_BUCKETS,
    STAGE_SECONDS,
    Metric,
    Metrics,
    StreamGauges,
)

Outcome = Literal["moved", "told", "duplicate", "rejected", "ended", "dead"]
_STREAM: Final = "tokenize"

REQUESTS: Final = Metric(
    "millrace_tokenizer_requests_total",
    "counter",
    "Requests done with, by outcome: moved to an engine, told (ids or text), duplicate, rejected, ended, dead",
    ("outcome",),
)
PROMPT_TOKENS: Final = Metric("millrace_tokenizer_prompt_tokens_total", "counter", "Prompt tokens made")
PROMPT_LENGTH: Final = Metric(
    "millrace_tokenizer_prompt_length_tokens",
    "histogram",
    "Tokens of one prompt",
    buckets=tuple(float(4**i) for i in range(11)),
)
ENCODE_SECONDS: Final = Metric(
    "millrace_tokenizer_encode_seconds", "histogram", "Rendering and encoding one batch", buckets=SHORT_BUCKETS
)
BATCH_REQUESTS: Final = Metric(
    "millrace_tokenizer_batch_requests",
    "histogram",
    "Requests encoded together",
    buckets=(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0),
)
HELD: Final = Metric("millrace_tokenizer_held", "gauge", "Encoded requests that no engine has taken yet")
ASIDE: Final = Metric("millrace_tokenizer_aside", "gauge", "Very long requests that are being encoded")
CLAIMS: Final = Metric("millrace_tokenizer_claims_total", "counter", "Requests taken over from a dead tokenizer")
NO_ENGINE: Final = Metric(
    "millrace_tokenizer_no_engine_total", "counter", "Times the chosen engine turned out to be gone"
)

TABLE: Final[tuple[Metric, ...]] = (
    REQUESTS, PROMPT_TOKENS, PROMPT_LENGTH, ENCODE_SECONDS, BATCH_REQUESTS, HELD, ASIDE, CLAIMS, NO_ENGINE,
)  # fmt: skip
"""Every metric of this service beside the common ones; documentation and dashboards are made from it."""


class TokenizerMetrics:
    """The recorder of one tokenizer; its methods may be called from any thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._requests = metrics.counter(REQUESTS)
        for outcome in ("moved", "told", "duplicate", "rejected", "ended", "dead"):
            self._requests.labels(outcome)
        self._prompt_tokens = metrics.counter(PROMPT_TOKENS)
        self._prompt_length = metrics.histogram(PROMPT_LENGTH)
        self._encode_seconds = metrics.histogram(ENCODE_SECONDS)
        self._batch = metrics.histogram(BATCH_REQUESTS)
        self._claims = metrics.counter(CLAIMS)
        self._no_engine = metrics.counter(NO_ENGINE)
        self._dead_letters = metrics.counter(DEAD_LETTERS)
        self._hop = metrics.histogram(HOP_SECONDS).labels(_STREAM)
        self._place = metrics.histogram(STAGE_SECONDS).labels("place")
        self._stream = StreamGauges(metrics, _STREAM)
        deliveries = metrics.counter(DELIVERIES)
        self._first, self._again = deliveries.labels(_STREAM, "first"), deliveries.labels(_STREAM, "again")
        for reason in ("crash", "unreadable"):
            self._dead_letters.labels(reason)

    def done(self, outcome: Outcome) -> None:
        """Count a request that this tokenizer is done with."""
        self._requests.labels(outcome).inc()

    def waited(self, seconds: float) -> None:
        """Note how long a request was on its way from the api."""
        self._hop.observe(max(0.0, seconds))

    def taken(self, num_requests: int, *, again: bool = False) -> None:
        """Count requests taken from the queue, for the first time or after somebody else."""
        (self._again if again else self._first).inc(num_requests)

    def placed(self, seconds: float) -> None:
        """Note how long an encoded request waited until an engine had it."""
        self._place.observe(max(0.0, seconds))

    def encoded(self, num_requests: int, seconds: float) -> None:
        """Note one batch."""
        self._batch.observe(num_requests)
        self._encode_seconds.observe(seconds)

    def prompt(self, num_tokens: int) -> None:
        """Count one prompt."""
        self._prompt_tokens.inc(num_tokens)
        self._prompt_length.observe(num_tokens)

    def claimed(self) -> None:
        """Count a request taken over."""
        self._claims.inc()
        self.taken(1, again=True)

    def no_engine(self) -> None:
        """Count an engine that was gone when its request came."""
        self._no_engine.inc()

    def buried(self, reason: Literal["crash", "unreadable"]) -> None:
        """Count a dead letter."""
        self._dead_letters.labels(reason).inc()
        self.done("dead")

    def backlog(self, backlog: Backlog, num_pending: int) -> None:
        """Note how full the queue is, and how many of its entries tokenizers have in hand."""
        self._stream.set(backlog.length, backlog.length - num_pending, num_pending, backlog.age_s)

    def watch(self, held: Callable[[], int], aside: Callable[[], int]) -> None:
        """Have the gauges read at each scrape; both must be quick and safe on any thread."""
        self._metrics.gauge(HELD).set_function(held)
        self._metrics.gauge(ASIDE).set_function(aside)
