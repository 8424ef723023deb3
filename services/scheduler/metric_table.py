"""The table of a scheduler's metrics: names, help texts, labels and buckets. Labels come from closed sets; no uid."""

from typing import Final

from shared.metrics import LATENCY_BUCKETS, SHORT_BUCKETS, Metric

ROWS_BUCKETS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
TOKENS_BUCKETS: Final = (*ROWS_BUCKETS, 2048.0, 4096.0, 8192.0, 16384.0)

RUNNING: Final = Metric("millrace_requests_running", "gauge", "Requests with a slot")
WAITING: Final = Metric("millrace_requests_waiting", "gauge", "Requests of this engine without a slot")
QUEUED_TOKENS: Final = Metric("millrace_queued_tokens", "gauge", "Prompt tokens of the waiting requests")
SLOTS: Final = Metric("millrace_slots", "gauge", "Request slots of the engine")
KV_PAGES: Final = Metric(
    "millrace_kv_pages",
    "gauge",
    "KV pages by state, each from its own books: free, live (of one request), cached (of the prefix cache), "
    "quarantined (until a step has retired)",
    ("state",),
)
KV_USAGE: Final = Metric(
    "millrace_kv_cache_usage_ratio", "gauge", "Share of the KV pages that no new request can have now, 0 to 1"
)
KV_EVICTED: Final = Metric("millrace_kv_evicted_pages_total", "counter", "Cached pages given up to make room")
LAST_STEP: Final = Metric(
    "millrace_last_step_timestamp_seconds", "gauge", "When the engine last settled a step, since the epoch; 0: never"
)
IDLE_SECONDS: Final = Metric("millrace_engine_idle_seconds_total", "counter", "Time in which no step could run")
BAD_ROWS: Final = Metric("millrace_bad_rows_total", "counter", "Requests ended because their logits were no numbers")
MODEL_INFO: Final = Metric(
    "millrace_model_info",
    "gauge",
    "Always 1; says what the engine serves and how",
    ("model", "engine", "device", "dtype", "tensor_parallel", "fingerprint", "max_seq_len"),
)
CACHE_INFO: Final = Metric(
    "millrace_cache_info", "gauge", "Always 1; says how the KV cache is cut", ("page_size", "num_pages", "prefix_cache")
)
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
STEPS: Final = Metric(
    "millrace_steps_total",
    "counter",
    "Engine steps settled, by how they ran: eager, decode_graph, mixed_graph (replayed from a CUDA graph)",
    ("path",),
)
STEP_TOKENS: Final = Metric(
    "millrace_step_tokens", "histogram", "Tokens computed in a step: one per decode row, and the chunks of prompts",
    buckets=TOKENS_BUCKETS,
)  # fmt: skip
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
    RUNNING, WAITING, QUEUED_TOKENS, SLOTS, KV_PAGES, KV_PAGES_CAPACITY, KV_USAGE, KV_EVICTED, LINK_PAUSED,
    UNCONFIRMED, LOAD_SECONDS, MODEL_INFO, CACHE_INFO, CACHE_QUERY_TOKENS, CACHE_HIT_TOKENS, PREFILL_TOKENS,
    GENERATED_TOKENS, STEPS, STEP_SECONDS, STEP_PART_SECONDS, STEP_ROWS, STEP_TOKENS, LAST_STEP, IDLE_SECONDS,
    BAD_ROWS, RETRACTIONS, FINISHED, ABORTS, FENCES, TAKEOVERS, LOG_RESTARTS, QUEUE_SECONDS, IO_TURN_SECONDS,
    PUBLISH_SECONDS,
)  # fmt: skip
"""Every metric of this service beside the common ones; documentation and dashboards are made from it."""
