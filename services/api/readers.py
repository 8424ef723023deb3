"""Streams that can be resumed, as one replica serves them: who reads one here, and what nobody reads anywhere.

A stream belongs to nobody: its record lies in the broker, and its readers, at whatever replicas, keep it alive.
Owns the record, the look at the logs of streams that nobody rings for here, the word to the broker that a stream is
read, and the look for those that are due, which any replica ends. Knows exchanges, nothing of HTTP.
Protocol: docs/protocol.md, the part on resuming.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from services.api.error_body import to_body
from services.api.exchange import Choice, Exchange
from services.api.job import Job
from services.api.metrics import ApiMetrics
from services.api.patience import run_patiently
from services.api.repair import Repair
from shared.broker import resumable
from shared.broker.backoff import Backoff
from shared.broker.call import Call
from shared.broker.connection import AsyncBroker
from shared.broker.limits import Limits
from shared.broker.replies import end, last_id, read_log
from shared.broker.resumable import Record
from shared.errors import (
    BrokerDown,
    BrokerError,
    DeadlineExceeded,
    NotFound,
    RateLimited,
    WireError,
)
from shared.messages import Delta, ErrorBody

log = logging.getLogger(__name__)

POLL_S: Final = 0.05
"""How often the logs of followed streams are looked at: what their readers wait for beyond the tokens."""
CANCELLED: Final = ErrorBody(499, "the client has cancelled this stream", "client_closed", "client_closed")
_IDLE_S: Final = 0.2
_TEND_S: Final = 5.0
_LAPSE_S: Final = 1.0
_TENDS_PER_LIFE: Final = 4
_CALLS: Final = 512
_CAP: Final = 100_000
"""Words to the broker kept while it is away."""
_LATE: Final = Delta(0, [], "", error=to_body(DeadlineExceeded("the request's deadline has passed")))

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Job).decode


class Readers:
    """All resumable streams that have a reader at this replica. `run` looks after them.

    Attributes:
        followed: those that nobody rings for here.
    """

    def __init__(self, broker: AsyncBroker, repair: Repair, metrics: ApiMetrics, *, life_ms: int) -> None:
        """Prepare; `run` works.

        Args:
            broker: shared with the rest of the replica.
            repair: reads logs.
            metrics: of the api.
            life_ms: how long a stream waits for a reader, as this replica opens them.
        """
        self._broker = broker
        self._repair = repair
        self._metrics = metrics
        self._life_ms = life_ms
        self._read: set[Exchange] = set()
        self.followed: set[Exchange] = set()
        self._over: list[Call[Any]] = []
        self._tended = self._lapsed = self._in_touch_since = 0.0

    # --- coming and going ----------------------------------------------------------------------------------

    async def open(self, exchange: Exchange, cap: int) -> None:
        """Keep the record of a stream that is about to be opened.

        Args:
            exchange: the request, which has its uids.
            cap: unfinished streams of this kind there may be.

        Raises:
            RateLimited: there are as many. Unavailable: the broker has no room. BrokerError: it is away.
        """
        kept = await run_patiently(self._broker, resumable.keep(self._broker.keys, _record(exchange), cap=cap))
        if kept == "FULL":
            raise RateLimited("too many streams that can be resumed are under way; try again later")
        self._read.add(exchange)

    async def attach(self, stream: str, key_hash: str) -> Job:
        """Come back to a stream; its life begins anew.

        Args:
            stream: uid of its first choice.
            key_hash: of the key that asks.

        Raises:
            NotFound: there is none of that name, or no more, or it is another key's.
            BrokerError, Unavailable: the broker is away.
        """
        attached = await run_patiently(self._broker, resumable.attach(self._broker.keys, stream, key_hash))
        if attached is None:
            raise no_such_stream()
        try:
            job = _decode(attached.data)
        except msgspec.DecodeError as e:
            log.error("the record of a stream cannot be read: %s", e, extra={"uid": stream})
            raise no_such_stream() from e
        job.timeout_s = None if attached.timeout_ms is None else max(0.001, attached.timeout_ms / 1000)
        return job

    async def follow(self, exchange: Exchange) -> None:
        """Read the logs of a stream that was come back to, and look at them from now on.

        Raises:
            NotFound: they have just gone. BrokerError: the broker is away.
        """
        calls = [read_log(self._broker.keys, choice.uid) for choice in exchange.choices]
        logs = await self._broker.run_many(calls)
        if not all(logs):
            raise no_such_stream()
        self._read.add(exchange)
        self.followed.add(exchange)
        for choice, entries in zip(exchange.choices, logs, strict=True):
            self._repair.take_up(choice, entries)

    def leave(self, exchange: Exchange) -> None:
        """Note that a reader has gone: with all of it, or somebody may come back, or nobody can."""
        self.followed.discard(exchange)
        if exchange not in self._read:
            return
        self._read.discard(exchange)
        keys, job = self._broker.keys, exchange.job
        stream = job.uids[0]
        if len(self._over) >= _CAP:
            return  # what is due ends without it
        if not exchange.announced:
            self._over += resumable.discard(keys, stream)
        elif exchange.num_open == 0:
            self._over.append(resumable.complete(keys, stream, job.resume_ms))
        else:
            self._over.append(resumable.put_off(keys, stream, job.resume_ms))

    async def cancel(self, job: Job) -> None:
        """End a stream for all who read it, and forget it.

        Raises:
            BrokerError: the broker is away; it may have ended.
        """
        keys = self._broker.keys
        ends = [end(keys, uid, Delta(0, [], "", error=CANCELLED)) for uid in job.uids]
        await self._broker.run_many([*ends, *resumable.discard(keys, job.uids[0])])

    def followed_choices(self) -> Iterable[Choice]:
        """Give the choices that nobody rings for, for the sweep."""
        return (choice for exchange in self.followed for choice in exchange.choices)

    # --- the work ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work for ever."""
        backoff = Backoff()
        while True:
            await asyncio.sleep(POLL_S if self.followed else _IDLE_S)
            try:
                await self.work()
                backoff.reset()
            except BrokerDown:
                self._in_touch_since = 0.0
                await asyncio.sleep(backoff.next_s())
            except (BrokerError, WireError) as e:
                log.error("resumable streams cannot be looked after: %s", e)
                await asyncio.sleep(backoff.next_s())

    async def work(self) -> None:
        """Do what is due now.

        Raises:
            BrokerError: not all of it was done.
        """
        await self._look_at_logs()
        over = self._over[:_CALLS]
        await self._broker.run_many(over)
        del self._over[: len(over)]
        now = time.monotonic()
        shortest = min((e.job.resume_ms for e in self._read), default=self._life_ms)
        every = min(_TEND_S, shortest / 1000 / _TENDS_PER_LIFE)
        if now - self._tended >= every:
            self._tended = now
            await self._tend(every)
        if now - self._lapsed >= min(every, _LAPSE_S):
            self._lapsed = now
            await self._end_due(now, 2 * every)

    async def _look_at_logs(self) -> None:
        """Have the logs read that have moved on."""
        choices = [c for c in self.followed_choices() if c.ended is None and not c.reading and not c.behind]
        for at in range(0, len(choices), _CALLS):
            batch = choices[at : at + _CALLS]
            lasts = await self._broker.run_many([last_id(self._broker.keys, c.uid) for c in batch])
            for choice, last in zip(batch, lasts, strict=True):
                if last != choice.last_id and choice.ended is None and not choice.is_closed():
                    self._repair.start(choice)

    async def _tend(self, every: float) -> None:
        """Say which streams are read, and keep again what the broker has lost."""
        keys = self._broker.keys
        read = [e for e in self._read if e.num_open]
        kept = await self._broker.run_many(
            [resumable.put_off(keys, e.job.uids[0], e.job.resume_ms + int(every * 1000)) for e in read]
        )
        lost = [e for e, answer in zip(read, kept, strict=True) if answer == "UNKNOWN" and e in self._read]
        await self._broker.run_many([resumable.keep(keys, _record(e)) for e in lost])

    async def _end_due(self, now: float, grace_s: float) -> None:
        """End what is due. After an outage the others must have had the time to say what they read."""
        if not self._in_touch_since:
            self._in_touch_since = now
        if now - self._in_touch_since > grace_s:
            lapsed = await self._broker.run(resumable.lapse(self._broker.keys, _LATE))
            self._metrics.abandoned.inc(lapsed.abandoned)


def no_such_stream() -> NotFound:
    """Make the error of a stream that is not there for who asks."""
    return NotFound("no such stream: it is over, or was never there, or another key's", code="stream_not_found")


def _record(exchange: Exchange) -> Record:
    job = exchange.job
    left = None
    if job.timeout_s is not None:
        left = max(1, int((job.timeout_s - (time.monotonic() - exchange.opened_at)) * 1000))
    data = _encode(dataclasses.replace(job, limits=Limits()))
    return Record(job.uids, job.key_hash, job.resume_ms, data, left)
