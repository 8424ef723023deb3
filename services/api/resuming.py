"""Answers as streams that a client may come back to: the first one, and those that go on behind an event.

Owns the life of such an answer, as `streaming.py` does that of a plain one. Whoever writes it, the events of a
stream are the same, so none are merged here, and each has an id.
"""

import asyncio
import time
from typing import Final

from starlette.types import Receive, Scope, Send

from services.api.body import RESUME
from services.api.error_body import to_body
from services.api.exchange import Exchange
from services.api.formats import COMMENT
from services.api.job import Job
from services.api.limits import make_claim
from services.api.numbered import Numbered
from services.api.places import Position, no_such_place, parse_position
from services.api.service import ApiService
from services.api.streaming import STREAM_HEADERS, Batch, GenerationResponse
from shared.errors import InvalidRequest
from shared.messages import ErrorBody

MAX_CHOICES: Final = 128
"""Choices of a stream that can be resumed: every event names the place of each."""
STREAM_ID: Final = b"x-millrace-stream-id"
_HEAD_AFTER_S: Final = 0.5
"""Seconds after which a client that waits for its first token is told at least the name of its stream."""


class ResumableResponse(GenerationResponse):
    """Runs one job as a stream that can be resumed."""

    def __init__(self, service: ApiService, job: Job) -> None:
        super().__init__(service, job)
        self._position: Position | None = None
        self._last = "begin.0"

    async def _open(self, exchange: Exchange, scope: Scope) -> None:
        job, service = exchange.job, self._service
        job.created, job.fingerprint = int(time.time()), service.fingerprint(job.model)
        job.claim = make_claim(job)  # whoever tells the end of the stream frees its place
        await service.readers.open(exchange, service.admission.capacity(job.model))
        await super()._open(exchange, scope)
        asyncio.get_running_loop().call_later(_HEAD_AFTER_S, _announce, exchange)

    async def _stream(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        """Write entries as they come, each with its events."""
        form = Numbered(exchange.job, self._position, self._last)
        batch = await exchange.take()
        out = form.begin() + self._number(exchange, form, batch)
        error = exchange.first_error()
        if exchange.gone:
            return
        if error is not None and (form.astray or (self._position is None and not exchange.started)):
            await self._refuse(exchange, error, scope, receive, send)
            return
        exchange.announced = True
        name = exchange.job.response_id.encode()
        await send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS, (STREAM_ID, name)]})
        while True:
            error = exchange.first_error()
            ended = exchange.num_open == 0 and not exchange.pending and not exchange.lagging
            if error is None and ended:
                out += form.end()
                error = _astray(exchange, form)
            if error is not None:
                self._service.metrics.error(error)
                out += form.error(error, final=exchange.failure is None and not form.astray)
            ended = ended or error is not None
            if ended:
                await self._service.free(exchange)
            if out or ended:
                await self._write(exchange, send, out, more=not ended)
            if ended or exchange.gone:
                return
            if exchange.lagging:
                self._service.replies.catch_up(exchange)
            batch = await exchange.take()
            out = self._number(exchange, form, batch)

    def _number(self, exchange: Exchange, form: Numbered, batch: Batch) -> bytes:
        """Give the events of a batch, or a comment where one is due and nothing else to say."""
        if not exchange.follows:
            for _, delta in batch:
                self._service.books.tokens(exchange, len(delta.token_ids), delta.stamp_ns)
        before = form.num_told
        out = form.entries(batch)
        if exchange.follows:
            self._service.books.given(form.num_told - before)
        _astray(exchange, form)
        if exchange.comment_due:
            exchange.comment_due = False
            return out or COMMENT
        return out


class ResumedResponse(ResumableResponse):
    """Goes on with a stream for a client that has come back."""

    def __init__(self, service: ApiService, job: Job, last: str | None) -> None:
        """Prepare.

        Args:
            service: the replica.
            job: of the stream, as `Readers.attach` gave it.
            last: id of the last event the client has; None for none.

        Raises:
            InvalidRequest: that is no id of this stream.
        """
        super().__init__(service, job)
        if last is not None:
            self._position, self._last = parse_position(last, job.num_choices), last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the rest."""
        exchange = Exchange(self._job, self._service.settings.max_unsent_bytes)
        exchange.follows = exchange.announced = True
        await self._answer(exchange, scope, receive, send)

    async def _open(self, exchange: Exchange, scope: Scope) -> None:
        await self._service.readers.follow(exchange)
        if not exchange.pending:
            exchange.nudge()


def _announce(exchange: Exchange) -> None:
    if not exchange.announced:
        exchange.nudge()


def check_resumable(job: Job) -> None:
    """Refuse to make an answer resumable that cannot be.

    Raises:
        InvalidRequest: it is not streamed, has too many choices, or is of the plain interface.
    """
    reason = ""
    if job.kind == "generate":
        reason = "only for chat and completions"
    elif not job.stream:
        reason = "only together with `stream: true`"
    elif job.num_choices > MAX_CHOICES:
        reason = f"at most {MAX_CHOICES} choices"
    if reason:
        raise InvalidRequest.of_field(RESUME, reason, "unsupported_parameter")


def _astray(exchange: Exchange, form: Numbered) -> ErrorBody | None:
    """End an answer whose reader named a place that is not in the stream."""
    if not form.astray:
        return None
    exchange.failure = to_body(no_such_place())
    return exchange.failure
