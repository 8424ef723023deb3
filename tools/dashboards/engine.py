"""The engines: what a step costs and where its time goes, what is in it, what the KV cache holds, who waits."""

from typing import Final

from services.scheduler import metric_table as table
from shared import metrics as common
from tools.dashboards import promql as q
from tools.dashboards.builder import Dashboard, Panel, Query, Row

NO_ENGINE: Final = "No engine"
_STATES: Final = ("live", "cached", "quarantined", "free")
_GRAPHS = q.rate(table.STEPS, path="~decode_graph|mixed_graph")

STEP: Final = Row("Steps", [
    Panel("Time of a step", "As the loop's thread sees it.", "s",
          [*(Query(q.quantile(p, table.STEP_SECONDS), f"p{p * 100:g}") for p in (0.5, 0.95, 0.99)),
           Query(q.mean(table.STEP_SECONDS), "mean")]),
    Panel("Parts of a step", "Mean per step: host (planning, settling), launch, wait (for the engine). Device time "
          "runs beside them.", "s", [Query(q.mean(table.STEP_PART_SECONDS, "part"), "{{part}}")]),
    Panel("Steps", "Per second, by how they ran: layer by layer, or replayed from a CUDA graph.", "short",
          [Query(q.rate(table.STEPS, "path"), "{{path}}")], stacked=True),
    Panel("Requests per step", "Mean and 95th percentile.", "short",
          [Query(q.mean(table.STEP_ROWS), "mean"), Query(q.quantile(0.95, table.STEP_ROWS), "p95")]),
    Panel("Tokens per step", "One per decode row, and the chunks of prompts.", "short",
          [Query(q.mean(table.STEP_TOKENS), "mean"), Query(q.quantile(0.95, table.STEP_TOKENS), "p95")]),
    Panel("Replayed from graphs", "Share of steps; 0 on a CPU.", "percentunit",
          [Query(q.ratio(_GRAPHS, q.rate(table.STEPS)), "graphs")], maximum=1),
    Panel("Idle", "Share of the time in which no step could run, by engine.", "percentunit",
          [Query(q.rate(table.IDLE_SECONDS, "instance"), "{{instance}}")], empty=NO_ENGINE, maximum=1),
    Panel("Since the last step", "Of engines that have something to run: above some seconds they are stuck.", "s",
          [Query(f"(time() - {q.gauge(table.LAST_STEP, 'instance', how='max')}) and "
                 f"{q.gauge(table.RUNNING, 'instance', how='max')} > 0", "{{instance}}")],
          empty="Nothing runs", may_be_empty=True),
    Panel("Paused", "1 while no step is taken: token streams full, or the lease not kept.", "short",
          [Query(q.gauge(table.LINK_PAUSED, "instance", how="max"), "{{instance}}")], empty=NO_ENGINE, maximum=1),
])  # fmt: skip

TOKENS: Final = Row("Tokens", [
    Panel("Tokens", "Prompt tokens computed and tokens drawn, per second.", "short",
          [Query(q.rate(table.PREFILL_TOKENS), "prefill"), Query(q.rate(table.GENERATED_TOKENS), "drawn")]),
    Panel("Drawn, by engine", "Tokens per second of each engine: are they loaded alike?", "short",
          [Query(q.rate(table.GENERATED_TOKENS, "instance"), "{{instance}}")]),
    Panel("Prefix cache", "Prompt tokens looked up, and those found, per second.", "short",
          [Query(q.rate(table.CACHE_QUERY_TOKENS), "looked up"), Query(q.rate(table.CACHE_HIT_TOKENS), "found")]),
    Panel("Hit ratio", "Share of looked-up prompt tokens that were found, by engine.", "percentunit",
          [Query(q.ratio(q.rate(table.CACHE_HIT_TOKENS, "instance"), q.rate(table.CACHE_QUERY_TOKENS, "instance")),
                 "{{instance}}")], maximum=1),
    Panel("Retractions", "Requests put back to the queue because pages ran out, per second.", "reqps",
          [Query(q.rate(table.RETRACTIONS, "instance"), "{{instance}}")], empty=NO_ENGINE),
    Panel("Evictions", "Cached pages given up to make room, per second.", "short",
          [Query(q.rate(table.KV_EVICTED, "instance"), "{{instance}}")], empty=NO_ENGINE),
])  # fmt: skip

PAGES: Final = Row("KV pages", [
    Panel("Pages", "By state, over all engines: each state is counted from its own books.", "short",
          [Query(q.gauge(table.KV_PAGES, state=state), state) for state in _STATES], empty=NO_ENGINE, stacked=True),
    Panel("In use", "Share of each engine's pages that no new request can have.", "percentunit",
          [Query(q.gauge(table.KV_USAGE, "instance"), "{{instance}}")], empty=NO_ENGINE, maximum=1),
    Panel("Books", "Pages in all states less the capacity: 0 but for moments. Anything lasting is a leak.", "short",
          [Query(f"{q.gauge(table.KV_PAGES, 'instance')} - {q.gauge(table.KV_PAGES_CAPACITY, 'instance')}",
                 "{{instance}}")], empty=NO_ENGINE),
])  # fmt: skip

REQUESTS: Final = Row("Requests", [
    Panel("Running", "Requests with a slot, by engine.", "short",
          [Query(q.gauge(table.RUNNING, "instance"), "{{instance}}"), Query(q.gauge(table.SLOTS), "slots, all")],
          empty=NO_ENGINE),
    Panel("Waiting", "Requests without a slot, and prompt tokens they bring, by engine.", "short",
          [Query(q.gauge(table.WAITING, "instance"), "{{instance}}"),
           Query(q.gauge(table.QUEUED_TOKENS, "instance"), "tokens {{instance}}")], empty=NO_ENGINE),
    Panel("From the api to a fence", "Time from the api's acceptance until an engine spoke for a request.", "s",
          [Query(q.quantile(0.5, table.QUEUE_SECONDS), "p50"), Query(q.quantile(0.95, table.QUEUE_SECONDS), "p95")]),
    Panel("In the engine", "95th percentile of waiting for room, prefill and decode.", "s",
          [Query(q.quantile(0.95, common.STAGE_SECONDS, "stage", stage="~admit|prefill|decode"), "{{stage}}")]),
    Panel("Ends", "Requests an engine is done with, per second. moved: another engine goes on.", "reqps",
          [Query(q.rate(table.FINISHED, "reason"), "{{reason}}")], stacked=True),
    Panel("Aborts", "Requests ended from outside, by what showed it.", "reqps",
          [Query(q.rate(table.ABORTS, "cause"), "{{cause}}")], empty=NO_ENGINE),
    Panel("Not confirmed", "Computed to their end, but the terminal is not in the log yet.", "short",
          [Query(q.gauge(table.UNCONFIRMED, "instance"), "{{instance}}")], empty=NO_ENGINE),
    Panel("Bad numbers", "Requests ended because their logits were no numbers, per second.", "reqps",
          [Query(q.rate(table.BAD_ROWS, "instance"), "{{instance}}")], empty=NO_ENGINE),
    Panel("Broker thread", "99th percentile of a turn of the I/O thread, and of a step's way into the broker.", "s",
          [Query(q.quantile(0.99, table.IO_TURN_SECONDS), "turn"),
           Query(q.quantile(0.99, table.PUBLISH_SECONDS), "publish")], empty=NO_ENGINE),
])  # fmt: skip

MODEL: Final = Row("Model", [
    Panel("Models", "What each engine serves and how. Metric: millrace_model_info.", "short",
          [Query(q.select(table.MODEL_INFO), "")], kind="table", width=12, empty=NO_ENGINE),
    Panel("Caches", "How each engine's KV cache is cut. Metric: millrace_cache_info.", "short",
          [Query(q.select(table.CACHE_INFO), "")], kind="table", width=8, empty=NO_ENGINE),
    Panel("Load time", "Time the slowest model took to load.", "s",
          [Query(q.gauge(table.LOAD_SECONDS, how="max"), "load")], kind="stat", width=4, empty=NO_ENGINE),
])  # fmt: skip

ENGINE: Final = Dashboard(
    "millrace-engine",
    "Millrace / Engine",
    "What a step costs, what is in it, what the KV cache holds, and who waits.",
    [STEP, TOKENS, PAGES, REQUESTS, MODEL],
)
