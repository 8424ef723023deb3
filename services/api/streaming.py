"""Answers: a stream of server-sent events, or one JSON body, written as plain ASGI messages.

Owns the life of one answer: open, wait for the first sign, choose between an HTTP error and a 200, write what
waits, notice the client's leaving at any moment, and close. No framework object, and no check of the
connection, per token. Errors before the first byte are plain HTTP errors; later ones end the stream with an
error event and no `[DONE]`.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.api.error_body import EndedWithError, error_response, to_body
from services.api.exchange import Choice, Exchange
from services.api.formats import COMMENT, Format, make_format
from services.api.job import Job
from services.api.limits import tell_limits
from services.api.service import ApiService
from shared.errors import DeadlineExceeded, RateLimited
from shared.messages import Delta, ErrorBody, LogprobEntry

STREAM_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]
ABORT_EXTENSION: Final = "millrace.abort"
"""Key in the scope's extensions under which our protocol class offers to drop the connection."""
Batch = list[tuple[Choice, Delta]]


class GenerationResponse(Response):
    """Runs one job to its end and writes the answer. Given to the framework as the route's response."""

    def __init__(self, service: ApiService, job: Job) -> None:
        super().__init__()
        self._service = service
        self._job = job
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Open the request, answer it, and leave nothing of it behind, however it ends."""
        service, job = self._service, self._job
        try:
            service.admission.check(job)
        except RateLimited:
            service.metrics.refused.labels("queue_full").inc()
            raise
        job.name_choices()
        await self._answer(Exchange(job, service.settings.max_unsent_bytes), scope, receive, send)

    async def _open(self, exchange: Exchange, scope: Scope) -> None:
        """Queue the request."""
        service = self._service
        service.metrics.intake.observe(exchange.opened_at - scope["state"]["began"])
        await service.open(exchange)
        tell_limits(scope, exchange)

    async def _answer(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        watcher = asyncio.create_task(_watch(receive, exchange))
        alarm = _set_alarm(exchange)
        service.enter(exchange)
        try:
            await self._open(exchange, scope)
            # In a task of its own, because waking one walks all its frames, and the framework's below us are many.
            answer = (self._stream if exchange.job.stream else self._collect)(exchange, scope, receive, send)
            exchange.task = asyncio.create_task(answer)
            await exchange.task
        except asyncio.CancelledError:
            if not exchange.cut:  # ours, of a client that does not read; any other is the server's end
                raise
            abort(scope)
            await receive()  # until the server has noticed: it then expects no more of the answer
        finally:
            watcher.cancel()
            if alarm is not None:
                alarm.cancel()
            service.leave(exchange)

    async def _stream(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        """Write deltas as they come, all that wait in one write."""
        form = make_format(exchange, self._service.fingerprint(exchange.job.model))
        batch = await exchange.take()
        error = exchange.first_error()
        if exchange.gone:
            return
        if error is not None:
            await self._refuse(exchange, error, scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        out = form.begin()
        while True:
            out += self._render(exchange, form, batch)
            error = exchange.first_error()
            ended = error is not None or (exchange.num_open == 0 and not exchange.pending and not exchange.lagging)
            if error is not None:
                self._service.metrics.error(error)
                out += form.error(error)
            elif ended:
                out += form.end()
            if ended:
                await self._service.free(exchange)
            if out:
                await self._write(exchange, send, out, more=not ended)
            if ended or exchange.gone:
                return
            if exchange.lagging:
                self._service.replies.catch_up(exchange)
            batch = await exchange.take()
            out = b""

    def _render(self, exchange: Exchange, form: Format, batch: Batch) -> bytes:
        """Give the bytes of a batch; several deltas of one choice become one chunk."""
        if exchange.comment_due:
            exchange.comment_due = False
            if not batch:
                return COMMENT
        if len(batch) == 1:
            choice, delta = batch[0]
            self._service.books.tokens(exchange, len(delta.token_ids), delta.stamp_ns)
            return form.delta(choice, delta.text, delta.logprobs, ending(delta))
        merged: dict[int, Batch] = {}
        for pair in batch:
            merged.setdefault(pair[0].index, []).append(pair)
        out = []
        for pairs in merged.values():
            choice, last = pairs[-1]
            text = "".join(delta.text for _, delta in pairs)
            logprobs = [entry for _, delta in pairs for entry in delta.logprobs]
            count = sum(len(delta.token_ids) for _, delta in pairs)
            self._service.books.tokens(exchange, count, last.stamp_ns)
            out.append(form.delta(choice, text, logprobs, ending(last)))
        return b"".join(out)

    async def _write(self, exchange: Exchange, send: Send, out: bytes, *, more: bool) -> None:
        """Send bytes; a client that does not read blocks here, and the service's sweep cuts it after a while."""
        exchange.sending_since = exchange.silent_since = time.monotonic()
        await send({"type": "http.response.body", "body": out, "more_body": more})
        exchange.sending_since = 0.0
        self._service.metrics.chunks.inc()

    async def _collect(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for the end of all choices, then answer once: all of it, or an error."""
        logprobs: list[list[LogprobEntry]] = [[] for _ in exchange.choices]
        while exchange.num_open or exchange.pending or exchange.lagging:
            batch = await exchange.take()
            for choice, delta in batch:
                logprobs[choice.index].extend(delta.logprobs)
                self._service.books.tokens(exchange, len(delta.token_ids), delta.stamp_ns)
            exchange.comment_due = False
            if exchange.gone:
                return
            if exchange.first_error() is not None:
                break
            if exchange.lagging:
                self._service.replies.catch_up(exchange)
        error = exchange.first_error()
        if error is not None:
            await self._refuse(exchange, error, scope, receive, send)
            return
        body = make_format(exchange, self._service.fingerprint(exchange.job.model)).whole(logprobs)
        await self._service.free(exchange)
        await Response(body, 200, media_type="application/json")(scope, receive, send)

    async def _refuse(self, exchange: Exchange, error: ErrorBody, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with an error alone: nothing was written yet."""
        self._service.metrics.error(error)
        await self._service.free(exchange)
        await error_response(EndedWithError(error))(scope, receive, send)


def ending(delta: Delta) -> Delta | None:
    """Give the delta itself if it ends its choice well."""
    return delta if delta.finish is not None else None


def abort(scope: Scope) -> None:
    """Drop the connection with what waits in its buffers: its client does not read them."""
    drop: Callable[[], None] | None = scope.get("extensions", {}).get(ABORT_EXTENSION)
    if drop is not None:
        drop()


async def _watch(receive: Receive, exchange: Exchange) -> None:
    """Wait for the client to leave: the one look at the connection, for the whole life of the request."""
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.hang_up()


def _set_alarm(exchange: Exchange) -> asyncio.TimerHandle | None:
    """End the request at its deadline, by this replica's clock alone."""
    if exchange.job.timeout_s is None:
        return None
    late = to_body(DeadlineExceeded(f"the request's deadline of {exchange.job.timeout_s:g} s has passed"))
    return asyncio.get_running_loop().call_later(exchange.job.timeout_s, exchange.fail, late)
