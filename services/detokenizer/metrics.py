"""The metric table of the detokenizer, and the handles its parts use."""

from typing import Final

from shared.metrics import SHORT_BUCKETS, Metric, Metrics

TOKENS: Final = Metric("millrace_detokenizer_tokens_total", "counter", "Tokens written to reply logs")
REPLIES: Final = Metric("millrace_detokenizer_replies", "gauge", "Replies whose text is kept in memory")
SHARDS: Final = Metric("millrace_detokenizer_shards", "gauge", "Token streams this instance reads")
FLUSH_SECONDS: Final = Metric(
    "millrace_detokenizer_flush_seconds",
    "histogram",
    "From tokens read to their text being in the logs",
    buckets=SHORT_BUCKETS,
)
REBUILDS: Final = Metric("millrace_detokenizer_rebuilds_total", "counter", "Replies read from their logs")
REFUSED: Final = Metric(
    "millrace_detokenizer_refused_total", "counter", "Writes refused because a log had moved on: a sibling was faster"
)
DROPPED: Final = Metric(
    "millrace_detokenizer_dropped_total",
    "counter",
    "Tokens of a step not said, by cause: over = ended or gone, fenced = another attempt speaks, gap = some before "
    "them are missing, broken = the log cannot be read",
    ("reason",),
)
STOP_MATCHES: Final = Metric("millrace_detokenizer_stop_matches_total", "counter", "Replies ended by a stop string")

TABLE: Final[tuple[Metric, ...]] = (
    TOKENS,
    REPLIES,
    SHARDS,
    FLUSH_SECONDS,
    REBUILDS,
    REFUSED,
    DROPPED,
    STOP_MATCHES,
)

DROP_REASONS: Final = ("over", "fenced", "gap", "broken")


class DetokenizerMetrics:
    """Handles on the metrics of the table, made once."""

    def __init__(self, metrics: Metrics) -> None:
        self.tokens = metrics.counter(TOKENS)
        self.replies = metrics.gauge(REPLIES)
        self.shards = metrics.gauge(SHARDS)
        self.flush_seconds = metrics.histogram(FLUSH_SECONDS)
        self.rebuilds = metrics.counter(REBUILDS)
        self.refused = metrics.counter(REFUSED)
        dropped = metrics.counter(DROPPED)
        self.dropped = {reason: dropped.labels(reason) for reason in DROP_REASONS}
        self.stop_matches = metrics.counter(STOP_MATCHES)
