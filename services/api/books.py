"""What is written down of every request: its metrics, what its client waited, and its span.

Owns the arithmetic of latencies and the names of endings. Knows exchanges, neither HTTP nor the broker.
"""

import time

from services.api.exchange import Exchange, count_usage
from services.api.metrics import ApiMetrics
from services.api.waits import Waits
from shared import tracing
from shared.messages import ErrorBody


class Books:
    """The books of one replica. Every `begin` is followed by one `end`, whatever happens."""

    def __init__(self, metrics: ApiMetrics, waits: Waits) -> None:
        """Open them.

        Args:
            metrics: of the api.
            waits: what clients wait for tokens, as the heartbeat tells it.
        """
        self._metrics = metrics
        self._waits = waits

    def begin(self, exchange: Exchange) -> None:
        """Note a request that came in, before it is queued: its span is what the other services' spans belong to."""
        metrics, job = self._metrics, exchange.job
        metrics.streams_open.inc()
        if exchange.follows:
            metrics.resumed.inc()
            return
        metrics.in_flight.inc(len(exchange.choices))
        span = tracing.start(job.kind, job.traceparent, request_id=job.request_id, gen_ai__request__model=job.model)
        if span is not None:
            exchange.span, job.traceparent = span, span.traceparent

    def tokens(self, exchange: Exchange, count: int, stamp_ns: int) -> None:
        """Measure tokens that are about to be written."""
        if not count:
            return
        now = time.monotonic()
        last, exchange.last_token_at = exchange.last_token_at, now
        self._waits.num_said += count
        if last:
            self._metrics.itl.observe(now - last)
            self._waits.next(now - last)
        else:
            exchange.first_token_at = now
            self._metrics.ttft.labels(exchange.job.model).observe(now - exchange.opened_at)
            self._waits.first(now - exchange.opened_at)
        if stamp_ns:
            self._metrics.delivery.observe(max(0.0, (time.time_ns() - stamp_ns) / 1e9))

    def given(self, count: int) -> None:
        """Count tokens of a stream that was come back to; how long they took is no measure of anything."""
        self._waits.num_said += count

    def end(self, exchange: Exchange, error: ErrorBody | None) -> None:
        """Note a request that is over here, with the error that it ended with, if any."""
        self._metrics.streams_open.dec()
        if exchange.follows:
            return
        self._metrics.in_flight.dec(len(exchange.choices))
        _end_span(exchange, error)
        if exchange.job.purpose == "generate":
            self._count_choices(exchange, error)
            self._count_tokens(exchange)

    def _count_choices(self, exchange: Exchange, error: ErrorBody | None) -> None:
        for choice in exchange.choices:
            if choice.ended is None and error is None and exchange.goes_on:
                self._metrics.finish("left")
                continue
            self._metrics.finish(_reason(choice.ended.finish if choice.ended else None, error))
            if choice.said:
                self._metrics.answer_tokens.observe(choice.said)

    def _count_tokens(self, exchange: Exchange) -> None:
        prompt, _, completion = count_usage(exchange)
        self._metrics.prompt_tokens.inc(prompt)
        self._metrics.generation_tokens.inc(completion)
        if any(choice.ended is not None for choice in exchange.choices):
            self._metrics.e2e.labels(exchange.job.model).observe(time.monotonic() - exchange.opened_at)
        if completion > len(exchange.choices):
            spent = exchange.last_token_at - exchange.first_token_at
            self._metrics.tpot.observe(spent / (completion / len(exchange.choices) - 1))


def _end_span(exchange: Exchange, error: ErrorBody | None) -> None:
    """Say in the request's span how it ended, and what it used."""
    if exchange.span is None:
        return
    prompt, cached, completion = count_usage(exchange)
    ended = exchange.choices[0].ended
    exchange.span.end(
        gen_ai__usage__input_tokens=prompt,
        gen_ai__usage__output_tokens=completion,
        cached_tokens=cached,
        choices=len(exchange.choices),
        finish=_reason(ended.finish if ended else None, error),
    )


def _reason(finish: str | None, error: ErrorBody | None) -> str:
    """Name how a choice ended, from a closed set."""
    if finish is not None:
        return finish
    if error is None:
        return "aborted"
    if error.status == 504:
        return "deadline"
    return "rejected" if error.status < 500 else "error"
