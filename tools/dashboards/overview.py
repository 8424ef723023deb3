"""The overview: is the service well, how fast is it for its clients, how much does it do, how much is left."""

from typing import Final

from services.api import metrics as api
from services.scheduler import metric_table as engine
from services.tokenizer import metrics as tokenizer
from shared import metrics as common
from shared.metrics import LATENCY_BUCKETS, SHORT_BUCKETS, Metric
from tools.dashboards import promql as q
from tools.dashboards.builder import Dashboard, Panel, Query, Row, one_of

TTFT_SLO: Final = [str(bound) for bound in LATENCY_BUCKETS if 0.1 <= bound <= 20]
ITL_SLO: Final = [str(bound) for bound in SHORT_BUCKETS if 0.005 <= bound <= 1]


def percentiles(title: str, metric: Metric, description: str) -> Panel:
    """Show the quantiles that people ask for, and the mean."""
    queries = [Query(q.quantile(p, metric), f"p{p * 100:g}") for p in (0.5, 0.95, 0.99)]
    return Panel(title, f"{description} Metric: {metric.name}.", "s", [*queries, Query(q.mean(metric), "mean")])


def stat(title: str, description: str, unit: str, expr: str, **more: object) -> Panel:
    """Show one number."""
    return Panel(title, description, unit, [Query(expr, title)], kind="stat", width=4, **more)  # type: ignore[arg-type]


_ERRORS = q.rate(api.FINISHED, reason="error")
_ALL = q.rate(api.FINISHED)

NOW: Final = Row("Now", [
    stat("Requests", "Choices that ended, per second. Metric: millrace_requests_finished_total.", "reqps", _ALL),
    stat("Output tokens", "Tokens handed to clients per second. Metric: millrace_api_generation_tokens_total.",
         "short", q.rate(api.GENERATION_TOKENS)),
    stat("First token, p95", "95 of 100 requests had their first token by then.", "s", q.quantile(0.95, api.TTFT),
         limits=(2, 10)),
    stat("Between chunks, p95", "95 of 100 gaps between two chunks of a stream were shorter.", "s",
         q.quantile(0.95, api.ITL), limits=(0.1, 0.5)),
    stat("Error share", "Share of choices that ended with an error of ours.", "percentunit", q.ratio(_ERRORS, _ALL),
         limits=(0.01, 0.05)),
    stat("Not ready", "Instances that answer and take no work. Metric: millrace_ready.", "short",
         q.or_zero(f"count({q.select(common.READY)} == 0)"), limits=(1, 2), empty="0"),
    stat("Running", "Requests with a slot in an engine.", "short", q.gauge(engine.RUNNING), empty="No engine"),
    stat("Waiting", "Requests of an engine without a slot.", "short", q.gauge(engine.WAITING), empty="No engine",
         limits=(50, 500)),
    stat("KV in use, most", "The fullest engine: share of its pages that no new request can have.", "percentunit",
         q.gauge(engine.KV_USAGE, how="max"), empty="No engine", limits=(0.9, 0.97)),
    stat("Engines", "Engines whose lease holds, as an api sees them.", "short",
         q.gauge(common.LIVING, how="max", role="scheduler"), empty="No api", limits=(1, 1), falling=True),
    stat("Broker", "1: every instance reaches the broker; 0: some do not.", "short",
         q.gauge(common.BROKER_UP, how="min"), empty="No instance", limits=(1, 1), falling=True),
    stat("Unreachable", "Targets that Prometheus knows and that do not answer.", "short",
         q.or_zero(f"count({q.select(q.UP)} == 0)"), empty="0", limits=(1, 2)),
])  # fmt: skip

LATENCY: Final = Row("Latency", [
    percentiles("Time to first token", api.TTFT, "From the request, its body read, to its first token."),
    percentiles("Between chunks", api.ITL, "Gap between two chunks of a stream; under load one holds several tokens."),
    percentiles("Time per output token", api.TPOT, "Mean time per token of a request, the first one aside."),
    percentiles("End to end", api.E2E, "From the request, its body read, to its end."),
    Panel("Time to first token, by model", "95th percentile per served model.", "s",
          [Query(q.quantile(0.95, api.TTFT, "model"), "{{model}}")]),
    Panel("Kept promises", "Share of requests whose first token came within $ttft_slo s, and of gaps between chunks "
          "within $itl_slo s.", "percentunit",
          [Query(q.share_within(api.TTFT, "$ttft_slo"), "first token"),
           Query(q.share_within(api.ITL, "$itl_slo"), "between chunks")], maximum=1),
    Panel("Time to first token, spread", "How the waits of all requests are spread.", "s",
          [Query(q.buckets(api.TTFT), "{{le}}")], kind="heatmap", width=12),
    Panel("Between chunks, spread", "How the gaps between chunks are spread.", "s",
          [Query(q.buckets(api.ITL), "{{le}}")], kind="heatmap", width=12),
])  # fmt: skip

TRAFFIC: Final = Row("Traffic", [
    Panel("Tokens", "Prompt tokens of answered requests, and tokens handed to clients, per second.", "short",
          [Query(q.rate(api.PROMPT_TOKENS), "prompt"), Query(q.rate(api.GENERATION_TOKENS), "output")]),
    Panel("Ends", "Choices per second by how they ended. aborted: the client left; rejected: refused with a 4xx; "
          "deadline: its own time was over; error: our fault.", "reqps",
          [Query(q.rate(api.FINISHED, "reason"), "{{reason}}")], stacked=True),
    Panel("Errors told", "Errors per second by OpenAI's type and HTTP status, before or within an answer.", "reqps",
          [Query(q.rate(api.ERRORS, "type", "status"), "{{status}} {{type}}")], empty="No errors", may_be_empty=True),
    Panel("HTTP", "Requests per second by status; 499: the client left.", "reqps",
          [Query(q.rate(api.HTTP_REQUESTS, "status"), "{{status}}")], stacked=True),
    Panel("Refused at the door", "Requests per second that were not let in, by reason.", "reqps",
          [Query(q.rate(api.REFUSED, "reason"), "{{reason}}")]),
    Panel("Lengths", "Tokens of a prompt and of an answer.", "short",
          [Query(q.quantile(p, metric), f"{what} p{p * 100:g}")
           for what, metric in (("prompt", tokenizer.PROMPT_LENGTH), ("answer", api.ANSWER_TOKENS))
           for p in (0.5, 0.95)]),
])  # fmt: skip

ROOM: Final = Row("Room", [
    Panel("Requests in engines", "With a slot, without one, and all slots there are.", "short",
          [Query(q.gauge(engine.RUNNING), "running"), Query(q.gauge(engine.WAITING), "waiting"),
           Query(q.gauge(engine.SLOTS), "slots")], empty="No engine"),
    Panel("KV in use", "Share of each engine's pages that no new request can have.", "percentunit",
          [Query(q.gauge(engine.KV_USAGE, "instance"), "{{instance}}")], empty="No engine", maximum=1),
    Panel("Prefix cache", "Share of looked-up prompt tokens that were found.", "percentunit",
          [Query(q.ratio(q.rate(engine.CACHE_HIT_TOKENS), q.rate(engine.CACHE_QUERY_TOKENS)), "hits")], maximum=1),
    Panel("In flight at the apis", "Choices accepted and not finished, and generation requests being answered.",
          "short", [Query(q.gauge(api.IN_FLIGHT, "instance"), "choices {{instance}}"),
                    Query(q.gauge(api.STREAMS_OPEN, "instance"), "requests {{instance}}")], empty="No api"),
    Panel("Prompt tokens that wait", "Of requests in an engine's queue.", "short",
          [Query(q.gauge(engine.QUEUED_TOKENS, "instance"), "{{instance}}")], empty="No engine"),
    Panel("Broker memory", "Used and allowed; without a limit only what is used is above zero.", "bytes",
          [Query(q.gauge(api.BROKER_MEMORY, how="max"), "used"),
           Query(q.gauge(api.BROKER_MEMORY_LIMIT, how="max"), "limit")], empty="No api"),
])  # fmt: skip

PROCESSES: Final = Row("Processes", [
    Panel("Processors", "Processor time per second, by instance. Workers of an api count together.", "short",
          [Query(f"rate({q.select(q.PROCESS_CPU)}[$__rate_interval])", "{{job}} {{instance}}")], empty="No instance"),
    Panel("Memory", "Resident memory by instance.", "bytes",
          [Query(q.select(q.PROCESS_MEMORY), "{{job}} {{instance}}")], empty="No instance"),
    Panel("Age", "Time since the process was started: a saw shows restarts.", "s",
          [Query(f"time() - {q.select(q.PROCESS_START)}", "{{job}} {{instance}}")], empty="No instance"),
    Panel("Instances", "Who is there, in which version, serving what. Metric: millrace_service_info.", "short",
          [Query(q.select(common.SERVICE_INFO), "")], kind="table", width=24, empty="No instance"),
])  # fmt: skip

OVERVIEW: Final = Dashboard(
    "millrace-overview",
    "Millrace / Overview",
    "Is the service well, how fast is it for its clients, how much does it do, how much room is left.",
    [NOW, LATENCY, TRAFFIC, ROOM, PROCESSES],
    (
        one_of("ttft_slo", "First token within (s)", TTFT_SLO, "2.0"),
        one_of("itl_slo", "Chunks within (s)", ITL_SLO, "0.2"),
    ),
)
