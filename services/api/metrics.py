"""The api's metrics, after vLLM's names where there is one. Labels come from closed sets only."""

import os
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from shared.messages import ErrorBody
from shared.metrics import (
    COMMON,
    EVENT_LOOP_DELAY,
    HOP_SECONDS,
    LATENCY_BUCKETS,
    SHORT_BUCKETS,
    STAGE_SECONDS,
    Metric,
    Metrics,
    bounded,
)

HTTP_REQUESTS: Final = Metric(
    "millrace_http_requests_total", "counter", "HTTP requests by route and status", ("route", "status")
)
IN_FLIGHT: Final = Metric("millrace_requests_in_flight", "gauge", "Choices accepted and not finished")
STREAMS_OPEN: Final = Metric("millrace_http_open_generations", "gauge", "Generation requests being answered")
TTFT: Final = Metric(
    "millrace_time_to_first_token_seconds", "histogram", "From the request to its first token", ("model",)
)
ITL: Final = Metric(
    "millrace_inter_token_latency_seconds", "histogram", "Gap between two chunks of a stream", buckets=SHORT_BUCKETS
)
TPOT: Final = Metric(
    "millrace_request_time_per_output_token_seconds",
    "histogram",
    "Mean time per token of a request, the first token aside",
    buckets=SHORT_BUCKETS,
)
E2E: Final = Metric(
    "millrace_e2e_request_latency_seconds", "histogram", "From the request to its end", ("model",), LATENCY_BUCKETS
)
FINISHED: Final = Metric("millrace_requests_finished_total", "counter", "Choices by how they ended", ("reason",))
ERRORS: Final = Metric(
    "millrace_request_errors_total",
    "counter",
    "Errors told to clients, before or within an answer, by OpenAI's type and HTTP status",
    ("type", "status"),
)
ANSWER_TOKENS: Final = Metric(
    "millrace_request_generation_tokens", "histogram", "Tokens of one choice",
    buckets=(1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0),
)  # fmt: skip
BROKER_MEMORY: Final = Metric(
    "millrace_broker_memory_bytes", "gauge", "Memory the broker uses; not a number while it is away", workers="max"
)
BROKER_MEMORY_LIMIT: Final = Metric(
    "millrace_broker_memory_limit_bytes", "gauge", "Memory the broker may use; 0: it has no limit", workers="max"
)
PROMPT_TOKENS: Final = Metric("millrace_api_prompt_tokens_total", "counter", "Prompt tokens of answered requests")
GENERATION_TOKENS: Final = Metric("millrace_api_generation_tokens_total", "counter", "Tokens handed to clients")
CHUNKS: Final = Metric("millrace_sse_chunks_total", "counter", "Writes to streaming clients; tokens merge under load")
DELIVERY: Final = Metric(
    "millrace_token_delivery_seconds", "histogram", "From the engine's step to the client's socket",
    buckets=SHORT_BUCKETS,
)  # fmt: skip
REFUSED: Final = Metric(
    "millrace_requests_refused_total", "counter", "Requests refused at the door, by reason", ("reason",)
)
LOG_READS: Final = Metric("millrace_reply_log_reads_total", "counter", "Reply logs read because of a gap or a takeover")
REOPENS: Final = Metric(
    "millrace_requests_reopened_total", "counter", "Requests opened again: the broker lost data, or nobody held them",
    ("why",),
)  # fmt: skip
LOST: Final = Metric("millrace_replies_lost_total", "counter", "Answers the broker's loss of data made impossible")
KEY_READS: Final = Metric(
    "millrace_api_keys_reloads_total", "counter", "Changes of the file of API keys: read, or refused", ("outcome",)
)
STRAYS: Final = Metric("millrace_stray_replies_total", "counter", "Uids in the inbox that are not this replica's")
RESUMED: Final = Metric("millrace_streams_resumed_total", "counter", "Times a client came back to a stream")
ABANDONED: Final = Metric("millrace_streams_abandoned_total", "counter", "Streams ended because nobody came back")
SLOW_CLIENTS: Final = Metric("millrace_slow_clients_cut_total", "counter", "Streams cut because nobody read them")

API: Final[tuple[Metric, ...]] = (
    HTTP_REQUESTS, IN_FLIGHT, STREAMS_OPEN, TTFT, ITL, TPOT, E2E, FINISHED, PROMPT_TOKENS, GENERATION_TOKENS,
    CHUNKS, DELIVERY, REFUSED, LOG_READS, REOPENS, LOST, STRAYS, SLOW_CLIENTS, RESUMED, ABANDONED, ERRORS,
    ANSWER_TOKENS, KEY_READS, BROKER_MEMORY, BROKER_MEMORY_LIMIT,
)  # fmt: skip
TABLE: Final = (*COMMON, *API)
"""Everything the api exports."""

MULTIPROCESS_DIR: Final = "PROMETHEUS_MULTIPROC_DIR"
"""Variable that makes the client library keep its numbers in files that the workers of one port share."""

FINISH_REASONS: Final = frozenset({
    "stop", "length", "tool_calls", "content_filter", "aborted", "deadline", "rejected", "left",
})  # fmt: skip
ERROR_TYPES: Final = frozenset({
    "invalid_request_error", "authentication_error", "permission_error", "rate_limit_error", "timeout_error",
    "service_unavailable_error", "server_error",
})  # fmt: skip
_ERROR_STATUS: Final = frozenset({400, 401, 403, 404, 405, 409, 413, 415, 429, 500, 501, 503, 504})
_INSTEAD_OF_SUMS: Final[Mapping[str, Any]] = {"process_start_time_seconds": min}


class ApiMetrics:
    """The api's metrics, made once per process."""

    def __init__(self, common: Metrics) -> None:
        self.common = common
        self.http_requests = common.counter(HTTP_REQUESTS)
        self.in_flight = common.gauge(IN_FLIGHT)
        self.streams_open = common.gauge(STREAMS_OPEN)
        self.ttft = common.histogram(TTFT)
        self.itl = common.histogram(ITL)
        self.tpot = common.histogram(TPOT)
        self.e2e = common.histogram(E2E)
        self.finished = common.counter(FINISHED)
        self.prompt_tokens = common.counter(PROMPT_TOKENS)
        self.generation_tokens = common.counter(GENERATION_TOKENS)
        self.chunks = common.counter(CHUNKS)
        self.delivery = common.histogram(DELIVERY)
        self.refused = common.counter(REFUSED)
        self.log_reads = common.counter(LOG_READS)
        self.reopens = common.counter(REOPENS)
        self.lost = common.counter(LOST)
        self.strays = common.counter(STRAYS)
        self.slow_clients = common.counter(SLOW_CLIENTS)
        self.resumed = common.counter(RESUMED)
        self.abandoned = common.counter(ABANDONED)
        self.event_loop_delay = common.histogram(EVENT_LOOP_DELAY)
        self.answer_tokens = common.histogram(ANSWER_TOKENS)
        self.inbox_hop = common.histogram(HOP_SECONDS).labels("inbox")
        stages = common.histogram(STAGE_SECONDS)
        self.intake, self.open = stages.labels("intake"), stages.labels("open")
        self._errors = common.counter(ERRORS)
        for reason in (*FINISH_REASONS, "error"):
            self.finished.labels(reason)
        self._key_reads = common.counter(KEY_READS)
        for outcome in ("read", "refused"):
            self._key_reads.labels(outcome)
        for reason in ("queue_full", "key_limits", "broker"):
            self.refused.labels(reason)

    def keys_read(self, success: bool) -> None:
        """Count a change of the file of API keys, and whether it could be used."""
        self._key_reads.labels("read" if success else "refused").inc()

    def error(self, body: ErrorBody) -> None:
        """Count an error that a client is told."""
        status = str(body.status if body.status in _ERROR_STATUS else body.status // 100 * 100)
        self._errors.labels(bounded(body.type, ERROR_TYPES), status).inc()

    def finish(self, reason: str) -> None:
        """Count how a choice ended."""
        self.finished.labels(bounded(reason, FINISH_REASONS, "error")).inc()

    def render(self) -> bytes:
        """Print the metrics of this process, or of all workers of the port."""
        directory = os.environ.get(MULTIPROCESS_DIR)
        if not directory:
            return self.common.render()
        registry = CollectorRegistry()
        MultiProcessCollector(registry, directory)  # type: ignore[no-untyped-call]
        PlatformCollector(registry)
        registry.register(_WorkerProcesses(directory))
        return generate_latest(registry)


class _WorkerProcesses:
    """The process metrics of all workers of a port, added up."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def collect(self) -> Iterable[Any]:
        """Give one family per process metric, with what the living workers use together."""
        found = (re.search(r"^gauge_live.*_(\d+)\.db$", name) for name in os.listdir(self._directory))
        families: dict[str, Any] = {}
        for pid in sorted({match[1] for match in found if match}):
            for family in ProcessCollector(pid=partial(str, pid), registry=None).collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    mine, its = known.samples[0], family.samples[0]
                    both = _INSTEAD_OF_SUMS.get(mine.name, lambda a, b: a + b)(mine.value, its.value)
                    known.samples = [mine._replace(value=both)]
        return families.values()


def forget_worker(pid: int) -> None:
    """Drop the gauges of a worker that has died; its counters stay in the sums."""
    if os.environ.get(MULTIPROCESS_DIR):
        mark_process_dead(pid)  # type: ignore[no-untyped-call]
