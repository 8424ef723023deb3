"""The pipeline: where a request's time goes, hop by hop, what waits where, and what was mended on the way."""

from typing import Final

from services.api import metrics as api
from services.detokenizer import metrics as detokenizer
from services.scheduler import metric_table as engine
from services.tokenizer import metrics as tokenizer
from shared import metrics as common
from shared.metrics import Metric
from tools.dashboards import promql as q
from tools.dashboards.builder import Dashboard, Panel, Query, Row

STEPS: Final[tuple[tuple[str, Metric, dict[str, str]], ...]] = (
    ("1 intake", common.STAGE_SECONDS, {"stage": "intake"}),
    ("2 open", common.STAGE_SECONDS, {"stage": "open"}),
    ("3 wait for a tokenizer", common.HOP_SECONDS, {"stream": "tokenize"}),
    ("4 encode", tokenizer.ENCODE_SECONDS, {}),
    ("5 wait for an engine", common.STAGE_SECONDS, {"stage": "place"}),
    ("6 way to the engine", common.HOP_SECONDS, {"stream": "generate"}),
    ("7 wait for room", common.STAGE_SECONDS, {"stage": "admit"}),
    ("8 prefill", common.STAGE_SECONDS, {"stage": "prefill"}),
    ("9 decode", common.STAGE_SECONDS, {"stage": "decode"}),
)
"""What happens to a request one after the other; the way of each token is its own row."""
TOKEN_WAY: Final[tuple[tuple[str, Metric, dict[str, str]], ...]] = (
    ("1 published", engine.PUBLISH_SECONDS, {}),
    ("2 read by a detokenizer", common.HOP_SECONDS, {"stream": "tokens"}),
    ("3 written as text", detokenizer.FLUSH_SECONDS, {}),
    ("4 read by the api", common.HOP_SECONDS, {"stream": "inbox"}),
    ("all, to the socket", api.DELIVERY, {}),
)


def per_service(title: str, description: str, metric: Metric, unit: str = "short", how: str = "max") -> Panel:
    """Show a gauge per instance."""
    return Panel(title, description, unit, [Query(q.gauge(metric, "job", "instance", how=how), "{{job}} {{instance}}")],
                 empty="No instance")  # fmt: skip


def counted(title: str, description: str, metric: Metric, label: str, *, rare: bool = False) -> Panel:
    """Show a counter by a label; what is rare is shown as a number per range."""
    return Panel(title, description, "reqps", [Query(q.rate(metric, label), f"{{{{{label}}}}}")],
                 empty="None so far" if rare else "No requests yet", may_be_empty=rare)  # fmt: skip


TIME: Final = Row("Where the time of a request goes", [
    Panel("Mean per stage", "Mean time in each stage, in the order of the way. Encoding is per batch.", "s",
          [Query(q.mean(metric, **labels), title) for title, metric, labels in STEPS], width=12, stacked=True),
    Panel("p95 per stage", "95th percentile of each stage.", "s",
          [Query(q.quantile(0.95, metric, **labels), title) for title, metric, labels in STEPS], width=12),
    Panel("Way of a token, mean", "From the settled step to the client's socket. Clocks of two machines are compared.",
          "s", [Query(q.mean(metric, **labels), title) for title, metric, labels in TOKEN_WAY], width=12),
    Panel("Way of a token, p99", "99th percentile of each hop and of the whole way.", "s",
          [Query(q.quantile(0.99, metric, **labels), title) for title, metric, labels in TOKEN_WAY], width=12),
])  # fmt: skip

STREAMS: Final = Row("Streams of the broker", [
    Panel("Oldest entry", "Age of the oldest entry: of tokenize and tokens it should be far below a second; an entry "
          "of generate lives as long as its request.", "s",
          [Query(q.gauge(common.STREAM_OLDEST_AGE, "stream", how="max"), "{{stream}}")], empty="No reader"),
    Panel("Unread", "Entries nobody has read yet. All tokenizers measure the same stream; the others have their own.",
          "short", [Query(q.gauge(common.STREAM_LAG, how="max", stream="tokenize"), "tokenize"),
                    Query(q.gauge(common.STREAM_LAG, "stream", stream="~generate|tokens"), "{{stream}}")],
          empty="No reader"),
    Panel("In hand", "Entries that somebody has read and not finished.", "short",
          [Query(q.gauge(common.STREAM_PENDING, how="max", stream="tokenize"), "tokenize"),
           Query(q.gauge(common.STREAM_PENDING, "stream", stream="~generate|tokens"), "{{stream}}")],
          empty="No reader"),
    Panel("Length", "All entries of a stream; engines pause when 2,000 wait in one of the tokens streams.", "short",
          [Query(q.gauge(common.STREAM_LENGTH, how="max", stream="tokenize"), "tokenize"),
           Query(q.gauge(common.STREAM_LENGTH, "stream", stream="~generate|tokens"), "{{stream}}")],
          empty="No reader"),
    Panel("Hops, p95", "Time from being written to being read, by stream.", "s",
          [Query(q.quantile(0.95, common.HOP_SECONDS, "stream"), "{{stream}}")]),
    Panel("Deliveries", "Entries taken per second: for the first time, or again after somebody died or lost contact.",
          "reqps", [Query(q.rate(common.DELIVERIES, "stream", "delivery"), "{{stream}} {{delivery}}")]),
])  # fmt: skip

BROKER: Final = Row("Broker", [
    Panel("Round trip", "One heartbeat's round trip, 99th percentile by service.", "s",
          [Query(q.quantile(0.99, common.BROKER_ROUND_TRIP, "job"), "{{job}}")], empty="No instance"),
    per_service("Reached", "1 while the broker answers.", common.BROKER_UP, how="min"),
    Panel("Memory", "Used and allowed.", "bytes",
          [Query(q.gauge(api.BROKER_MEMORY, how="max"), "used"),
           Query(q.gauge(api.BROKER_MEMORY_LIMIT, how="max"), "limit")], empty="No api"),
    Panel("Comes back", "Times the broker was reached again, per second.", "reqps",
          [Query(q.rate(common.BROKER_RECONNECTS, "job"), "{{job}}")], empty="No instance"),
    per_service("Heartbeat", "Time since the broker took an instance's heartbeat; above the lease others take over.",
                common.HEARTBEAT_AGE, "s"),
    per_service("Loop", "Time since a service's own loop last came round.", common.LOOP_AGE, "s"),
])  # fmt: skip

SERVICES: Final = Row("Services", [
    Panel("Api: event loop", "How late a timer runs: every client waits so long.", "s",
          [Query(q.quantile(0.5, common.EVENT_LOOP_DELAY), "p50"),
           Query(q.quantile(0.99, common.EVENT_LOOP_DELAY), "p99")], empty="No api"),
    Panel("Api: tokens per write", "Tokens merge in one write when clients or the api are behind.", "short",
          [Query(q.ratio(q.rate(api.GENERATION_TOKENS), q.rate(api.CHUNKS)), "tokens per write")],
          empty="No stream yet", may_be_empty=True),
    Panel("Tokenizer: batch", "Requests encoded together.", "short",
          [Query(q.mean(tokenizer.BATCH_REQUESTS), "mean"),
           Query(q.quantile(0.95, tokenizer.BATCH_REQUESTS), "p95")]),
    counted("Tokenizer: requests", "Requests done with, by outcome.", tokenizer.REQUESTS, "outcome"),
    Panel("Tokenizer: in hand", "Encoded requests that no engine has taken, and very long ones being encoded.", "short",
          [Query(q.gauge(tokenizer.HELD), "held"), Query(q.gauge(tokenizer.ASIDE), "aside")], empty="No tokenizer"),
    Panel("Detokenizer: tokens", "Tokens written to reply logs per second.", "short",
          [Query(q.rate(detokenizer.TOKENS, "instance"), "{{instance}}")]),
    Panel("Detokenizer: replies", "Replies whose text is kept in memory, and token streams read.", "short",
          [Query(q.gauge(detokenizer.REPLIES), "replies"), Query(q.gauge(detokenizer.SHARDS), "streams")],
          empty="No detokenizer"),
    Panel("Detokenizer: logs", "Replies read from their logs, and writes that a sibling was faster with.", "reqps",
          [Query(q.rate(detokenizer.REBUILDS), "read"), Query(q.rate(detokenizer.REFUSED), "refused")]),
    counted("Detokenizer: tokens not said", "Why tokens of a step did not go into a log.", detokenizer.DROPPED,
            "reason"),
])  # fmt: skip

MENDED: Final = Row("What was mended", [
    Panel("Living", "Instances whose lease holds, as the apis see them.", "short",
          [Query(q.gauge(common.LIVING, "role", how="max"), "{{role}}")], empty="No instance"),
    counted("Leases that ended", "Instances that died, by role; each observer counts.", common.LEASES_LOST, "role"),
    counted("Takeovers", "Requests taken from a dead engine (crash), or handed over (drain).", engine.TAKEOVERS, "why"),
    counted("Aborts", "Requests ended from outside, by what showed it to the engine.", engine.ABORTS, "cause"),
    counted("Dead letters", "Requests and messages given up, by reason.", common.DEAD_LETTERS, "reason"),
    counted("Opened again", "Requests opened again by an api, by why.", api.REOPENS, "why", rare=True),
    Panel("Apis: repairs", "Reply logs read, answers lost with the broker's data, strays, slow clients cut.", "reqps",
          [Query(q.rate(api.LOG_READS), "logs read"), Query(q.rate(api.LOST), "lost"),
           Query(q.rate(api.STRAYS), "strays"), Query(q.rate(api.SLOW_CLIENTS), "slow clients cut")],
          empty="No api"),
    counted("Fences", "Answers of reply logs to engines that wanted to speak.", engine.FENCES, "answer"),
    Panel("Restarts from a log", "Requests started again because the broker lost data, and requests claimed from dead "
          "tokenizers.", "reqps",
          [Query(q.rate(engine.LOG_RESTARTS), "from a log"), Query(q.rate(tokenizer.CLAIMS), "claimed")],
          empty="No instance"),
])  # fmt: skip

PIPELINE: Final = Dashboard(
    "millrace-pipeline",
    "Millrace / Pipeline",
    "Where a request's time goes, what waits in which stream, and what was mended on the way.",
    [TIME, STREAMS, BROKER, SERVICES, MENDED],
)
