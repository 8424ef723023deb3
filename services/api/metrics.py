"""The api's metrics, after vLLM's names where there is one. Labels come from closed sets only."""

import os
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from shared.metrics import COMMON, EVENT_LOOP_DELAY, LATENCY_BUCKETS, SHORT_BUCKETS, Metric, Metrics, bounded

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
STRAYS: Final = Metric("millrace_stray_replies_total", "counter", "Uids in the inbox that are not this replica's")
SLOW_CLIENTS: Final = Metric("millrace_slow_clients_cut_total", "counter", "Streams cut because nobody read them")

API: Final[tuple[Metric, ...]] = (
    HTTP_REQUESTS, IN_FLIGHT, STREAMS_OPEN, TTFT, ITL, TPOT, E2E, FINISHED, PROMPT_TOKENS, GENERATION_TOKENS,
    CHUNKS, DELIVERY, REFUSED, LOG_READS, REOPENS, LOST, STRAYS, SLOW_CLIENTS,
)  # fmt: skip
TABLE: Final = (*COMMON, *API)
"""Everything the api exports."""

MULTIPROCESS_DIR: Final = "PROMETHEUS_MULTIPROC_DIR"
"""Variable that makes the client library keep its numbers in files that the workers of one port share."""

FINISH_REASONS: Final = frozenset({"stop", "length", "tool_calls", "content_filter", "aborted", "deadline", "rejected"})


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
        self.event_loop_delay = common.histogram(EVENT_LOOP_DELAY)

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
        return generate_latest(registry)


def forget_worker(pid: int) -> None:
    """Drop the gauges of a worker that has died; its counters stay in the sums."""
    if os.environ.get(MULTIPROCESS_DIR):
        mark_process_dead(pid)  # type: ignore[no-untyped-call]
