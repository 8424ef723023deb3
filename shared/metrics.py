"""The metrics every service has, and the table form in which each service names its own.

Owns names, help texts, labels and buckets of the common metrics; each service's `metrics.py` holds a table of
the same kind, and documentation and dashboards are made from those tables. Knows no service. Labels come
from closed sets only: never a uid, a path as typed, or anything else a client chooses.
"""

import threading
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series beside every counter and histogram

LATENCY_BUCKETS: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0,
)  # fmt: skip
"""Seconds, 1 ms to minutes: any wait that a client can feel."""
SHORT_BUCKETS: Final = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip
"""Seconds, 0.1 ms up: work inside one service."""

STALE_S: Final = 10.0
"""A measured gauge that nobody has renewed for so long is left out of the page."""

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of a metric table. Counters are named with their `_total`.

    Attributes:
        workers: what a gauge of several processes behind one port shows: their sum, the least or the largest.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    workers: Literal["sum", "min", "max"] = "sum"


SERVICE_INFO: Final = Metric(
    "millrace_service_info",
    "gauge",
    "Always 1; says who this is",
    ("service", "name", "version", "model"),
    workers="max",
)
READY: Final = Metric("millrace_ready", "gauge", "1 while the service takes work", workers="min")
DRAINING: Final = Metric("millrace_draining", "gauge", "1 between the first SIGTERM and the end", workers="max")
LOOP_AGE: Final = Metric("millrace_loop_age_seconds", "gauge", "Time since the service's own loop last came round")
EVENT_LOOP_DELAY: Final = Metric(
    "millrace_event_loop_delay_seconds", "histogram", "How late asyncio runs a timer", buckets=SHORT_BUCKETS
)
HEARTBEAT_AGE: Final = Metric(
    "millrace_heartbeat_age_seconds", "gauge", "Time since the broker last took this service's heartbeat"
)
LIVING: Final = Metric(
    "millrace_instances_living", "gauge", "Instances whose lease holds, as this service sees them", ("role",),
    workers="min",
)  # fmt: skip
LEASES_LOST: Final = Metric(
    "millrace_leases_lost_total", "counter", "Leases that this service saw end: instances that died", ("role",)
)
STAGE_SECONDS: Final = Metric(
    "millrace_stage_seconds",
    "histogram",
    "Time of a request in one stage: intake (body read and checked), open (queued at the broker), place (encoded, "
    "until an engine has it), admit (until the engine has room), prefill (until the first token), decode (until the "
    "last)",
    ("stage",),
    LATENCY_BUCKETS,
)
BROKER_UP: Final = Metric("millrace_broker_up", "gauge", "1 while the broker answers", workers="min")
BROKER_RECONNECTS: Final = Metric("millrace_broker_reconnects_total", "counter", "Times the broker came back")
BROKER_ROUND_TRIP: Final = Metric(
    "millrace_broker_round_trip_seconds", "histogram", "One heartbeat's round trip", buckets=SHORT_BUCKETS
)
STRANGE_KEYS: Final = Metric(
    "millrace_broker_strange_keys_total", "counter", "Keys of ours that held something else; it was put aside"
)
STREAM_LENGTH: Final = Metric(
    "millrace_stream_length", "gauge", "Entries in a stream, by the service that reads it", ("stream",)
)
STREAM_LAG: Final = Metric("millrace_stream_lag", "gauge", "Entries of a stream that nobody has read yet", ("stream",))
STREAM_PENDING: Final = Metric(
    "millrace_stream_pending", "gauge", "Entries of a stream that somebody has read and not finished", ("stream",)
)
DELIVERIES: Final = Metric(
    "millrace_stream_deliveries_total",
    "counter",
    "Entries taken from a stream, by whether somebody had them before: first, again",
    ("stream", "delivery"),
)
STREAM_OLDEST_AGE: Final = Metric(
    "millrace_stream_oldest_age_seconds", "gauge", "Age of the oldest entry of a stream", ("stream",)
)
HOP_SECONDS: Final = Metric(
    "millrace_hop_seconds",
    "histogram",
    "Time an entry waited in a stream until it was read",
    ("stream",),
    LATENCY_BUCKETS,
)
DEAD_LETTERS: Final = Metric(
    "millrace_dead_letters_total", "counter", "Requests and messages given up by this service", ("reason",)
)

COMMON: Final[tuple[Metric, ...]] = (
    SERVICE_INFO,
    READY,
    DRAINING,
    LOOP_AGE,
    EVENT_LOOP_DELAY,
    HEARTBEAT_AGE,
    LIVING,
    LEASES_LOST,
    STAGE_SECONDS,
    BROKER_UP,
    BROKER_RECONNECTS,
    BROKER_ROUND_TRIP,
    STRANGE_KEYS,
    STREAM_LENGTH,
    STREAM_LAG,
    STREAM_PENDING,
    STREAM_OLDEST_AGE,
    DELIVERIES,
    HOP_SECONDS,
    DEAD_LETTERS,
)
"""The table of the metrics every service may have."""


class Metrics:
    """The registry of one process: makes each metric of the tables once, and prints them all.

    A metric is made when it is first asked for, so a service exports just what it uses. Thread-safe.
    """

    def __init__(self, service: str, instance: str, model: str, version: str) -> None:
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._made: dict[str, Counter | Gauge | Histogram] = {}
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.gauge(SERVICE_INFO).labels(service, instance, version, model).set(1)

    def counter(self, metric: Metric) -> Counter:
        """Give the counter of a table row."""
        made = self._make(metric, "counter")
        assert isinstance(made, Counter)
        return made

    def gauge(self, metric: Metric) -> Gauge:
        """Give the gauge of a table row."""
        made = self._make(metric, "gauge")
        assert isinstance(made, Gauge)
        return made

    def histogram(self, metric: Metric) -> Histogram:
        """Give the histogram of a table row."""
        made = self._make(metric, "histogram")
        assert isinstance(made, Histogram)
        return made

    def render(self) -> bytes:
        """Print all metrics in the text format of Prometheus; its media type is CONTENT_TYPE."""
        return generate_latest(self.registry)

    def _make(self, metric: Metric, kind: Kind) -> Counter | Gauge | Histogram:
        if metric.kind != kind:
            raise TypeError(f"{metric.name} is a {metric.kind}, not a {kind}")
        with self._lock:
            made = self._made.get(metric.name)
            if made is None:
                made = self._made[metric.name] = self._new(metric)
            return made

    def _new(self, metric: Metric) -> Counter | Gauge | Histogram:
        if metric.kind == "counter":
            return Counter(metric.name, metric.help, metric.labels, registry=self.registry)
        if metric.kind == "gauge":
            modes: dict[str, Literal["livesum", "livemin", "livemax"]] = {
                "sum": "livesum", "min": "livemin", "max": "livemax",
            }  # fmt: skip
            mode = modes[metric.workers]
            return Gauge(metric.name, metric.help, metric.labels, registry=self.registry, multiprocess_mode=mode)
        return Histogram(
            metric.name, metric.help, metric.labels, registry=self.registry, buckets=metric.buckets or LATENCY_BUCKETS
        )


class StreamGauges:
    """The gauges of one stream, as its reader measures them; left out of the page once they are stale.

    A registry has one of these. `set` belongs to one thread, scrapes may come on any.
    """

    def __init__(self, metrics: Metrics, stream: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._now: tuple[float, float, float, float] = (0, 0, 0, 0)
        self._measured_s = float("-inf")
        metrics.registry.register(self)

    def set(self, length: int, lag: int, pending: int, age_s: float) -> None:
        """Note a measurement: entries in all, unread, read and not finished, and the age of the oldest."""
        self._now = (length, max(0, lag), max(0, pending), age_s)
        self._measured_s = self._clock()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Give the families of a scrape."""
        fresh = self._clock() - self._measured_s < STALE_S
        rows = (STREAM_LENGTH, STREAM_LAG, STREAM_PENDING, STREAM_OLDEST_AGE)
        for metric, value in zip(rows, self._now, strict=True):
            family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            if fresh:
                family.add_metric([self._stream], value)
            yield family


def bounded(value: str, allowed: Container[str], other: str = "other") -> str:
    """Give a label value from a closed set: the value itself if it is in there, else `other`."""
    return value if value in allowed else other


def table(metrics: Iterable[Metric]) -> str:
    """Write a metric table as Markdown, for docs/metrics.md."""
    rows = ["| name | type | labels | meaning |", "|---|---|---|---|"]
    rows += [f"| `{m.name}` | {m.kind} | {', '.join(m.labels) or '-'} | {m.help} |" for m in metrics]
    return "\n".join(rows) + "\n"
