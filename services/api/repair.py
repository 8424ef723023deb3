"""What the replica does when a reply does not simply go on: reads the log, opens it again, or gives up.

Owns the sweep over silent requests. The rules are those of docs/protocol.md: the log is compared with what the
client was told (`log_reading.py`); an agreeing log is continued, one that is gone or disagrees is opened again
with what was told, and one that ended well but disagrees ends the answer with `broker_lost_data`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from services.api import log_reading
from services.api.exchange import Choice
from services.api.fleet import Fleet
from services.api.metrics import ApiMetrics
from services.api.requests import make_repair, make_request
from shared.broker.connection import AsyncBroker
from shared.broker.log_id import LogId, split_log_id
from shared.broker.replies import Glance, LogEntry, read_log, sweep
from shared.broker.streams import is_queued, open_request
from shared.errors import BrokerDown, BrokerError, WireError
from shared.messages import ErrorBody

log = logging.getLogger(__name__)

MAX_UNHELD: Final = 3
"""Times a request is opened again because nobody holds it, before it is given up."""
MAX_REOPENS: Final = 20
SWEEP_S: Final = 0.5
_SWEEP_BATCH: Final = 256
_READ_COUNT: Final = 256
"""Entries read at once of a log that goes on: bounds how long the event loop is busy with one."""

LOST_DATA: Final = ErrorBody(500, "the message broker lost part of this answer", "server_error", "broker_lost_data")
GIVEN_UP: Final = ErrorBody(500, "the request was lost repeatedly and is given up", "server_error", "request_lost")


class Repair:
    """Reads logs for the replica, one task per choice that needs it.

    Args:
        broker: shared with the rest of the replica.
        replica: the incarnation.
        fleet: tells whether an engine lives at all.
        metrics: of the api; reads and reopens are counted.
        repair_after: seconds of silence before a log is looked at.
        reopen_after: seconds without a holder before a request is opened again.
        end_stray: ends a uid for which nobody waits any more.
    """

    def __init__(
        self,
        broker: AsyncBroker,
        replica: str,
        fleet: Fleet,
        metrics: ApiMetrics,
        *,
        repair_after: float,
        reopen_after: float,
        end_stray: Callable[[str], None],
    ) -> None:
        self._broker = broker
        self._replica = replica
        self._fleet = fleet
        self._metrics = metrics
        self._repair_after = repair_after
        self._reopen_after = reopen_after
        self._end_stray = end_stray
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, choice: Choice) -> None:
        """Have the log of a choice read, unless that is under way; a ring that comes meanwhile has it read again."""
        if choice.reading:
            choice.again = True
            return
        choice.reading = True
        task = asyncio.get_running_loop().create_task(self._read(choice))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def take_up(self, choice: Choice, entries: Sequence[LogEntry]) -> None:
        """Begin to follow a log from its first entry: what a client came back to."""
        choice.opened = True
        reading = log_reading.read(entries, choice.token_ids)
        choice.attempt, choice.entry = reading.attempt, reading.entry
        self._continue(choice, reading)

    async def sweep(self, choices: Collection[Choice], *, everything: bool = False) -> None:
        """Look at the logs of silent requests, of all at once after a lost connection.

        Raises:
            BrokerError: nothing, or not everything, was looked at; the next sweep does.
        """
        now = time.monotonic()
        if everything:  # whoever holds a request could say so no more than we could hear it
            for choice in choices:
                choice.held_at = now
        silent = [
            c
            for c in choices
            if c.opened and c.ended is None and not c.reading and not c.behind
            and (everything or now - c.touched >= self._repair_after)
        ]  # fmt: skip
        for several in (False, True):
            alike = [c for c in silent if bool(c.exchange.job.resume_ms) == several]
            for at in range(0, len(alike), _SWEEP_BATCH):
                batch = alike[at : at + _SWEEP_BATCH]
                glances = await self._broker.run(sweep(self._broker.keys, [c.uid for c in batch], several=several))
                await self._judge(zip(batch, glances, strict=True))

    async def _judge(self, seen: Iterable[tuple[Choice, Glance]]) -> None:
        now = time.monotonic()
        for choice, glance in seen:
            choice.touched = now
            if glance.held or not self._fleet.living("scheduler", choice.exchange.job.model):
                choice.held_at = now  # an engine that is still being started will take it from the one that died
            if choice.reading or choice.ended is not None:
                continue
            if glance.last != choice.last_id:
                self.start(choice)
            elif now - choice.held_at >= self._reopen_after:
                await self._reclaim(choice)

    async def _reclaim(self, choice: Choice) -> None:
        """Open a request again that nobody holds and nobody has queued, though engines have lived all the while."""
        model = choice.exchange.job.model
        if await self._broker.run(is_queued(self._broker.keys, model, choice.entry or b"0-0")):
            choice.held_at = time.monotonic()
            return
        if choice.ended is not None or choice.reading:
            return  # a ring came meanwhile
        choice.unheld += 1
        if choice.unheld >= MAX_UNHELD:
            choice.exchange.fail(GIVEN_UP)
            return
        choice.reading = True
        try:
            await self._reopen(choice, LogId(choice.last_id), "unheld")
        finally:
            choice.reading = False

    async def _read(self, choice: Choice) -> None:
        """Read until no ring came meanwhile. What fails here is tried again by the sweep."""
        try:
            while True:
                choice.again = False
                await self._read_once(choice)
                if not choice.again or choice.ended is not None or choice.behind:
                    break
        except BrokerDown:
            choice.touched = 0.0
        except (BrokerError, WireError):
            log.exception("a reply log cannot be read", extra=_naming(choice))
            choice.exchange.fail(LOST_DATA)
        finally:
            choice.reading = False

    async def _read_once(self, choice: Choice) -> None:
        self._metrics.log_reads.inc()
        reading = await self._follow(choice) if choice.said else None
        if reading is None:
            entries = await self._broker.run(read_log(self._broker.keys, choice.uid))
            reading = log_reading.read(entries, choice.token_ids, len(choice.text))
        if choice.ended is not None:
            return
        choice.attempt = max(choice.attempt, reading.attempt)
        if reading.entry:
            choice.entry = reading.entry
        if reading.verdict == "lost":
            self._metrics.lost.inc()
            choice.exchange.fail(LOST_DATA)
        elif reading.verdict == "reopen":
            await self._reopen(choice, reading.last, "data")
        else:
            self._continue(choice, reading)

    async def _follow(self, choice: Choice) -> log_reading.Reading | None:
        """Read what follows on what was said: under load gaps are many, and logs long."""
        last = LogId(choice.last_id)
        entries = await self._broker.run(read_log(self._broker.keys, choice.uid, since=last, count=_READ_COUNT))
        choice.again = choice.again or len(entries) == _READ_COUNT
        return log_reading.follow(entries, last)

    def _continue(self, choice: Choice, reading: log_reading.Reading) -> None:
        """Say what is new, as far as a slow client's buffer goes."""
        if reading.last:
            choice.last_id = reading.last
        for log_id, delta in reading.fresh:
            if choice.exchange.full:
                choice.exchange.leave_behind(choice)
                return
            choice.say(delta, log_id)

    async def _reopen(self, choice: Choice, expect: LogId, why: str) -> None:
        """Queue a choice again with what its client was told. CHANGED: somebody wrote meanwhile, so read again."""
        if choice.is_closed():
            return
        choice.reopens += 1
        if choice.reopens > MAX_REOPENS:
            choice.exchange.fail(GIVEN_UP)
            return
        log.warning("a reply log is opened again (%s) behind %d tokens", why, choice.said, extra=_naming(choice))
        self._metrics.reopens.labels(why).inc()
        request = make_request(choice.exchange.job, [choice])
        again = make_repair(choice, self._replica, expect)
        opened = await self._broker.run(open_request(self._broker.keys, request, [again], cap=None))
        if opened.outcome != "OK":
            choice.again = True
            return
        if choice.is_closed():  # its client left during the round trip: its end may have come before this log
            if not choice.exchange.job.resume_ms:
                self._end_stray(choice.uid)
            return
        choice.last_id, choice.entry = opened.log_ids[0], opened.entry
        choice.attempt = split_log_id(opened.log_ids[0])[0]
        choice.touched = choice.held_at = time.monotonic()


def _naming(choice: Choice) -> dict[str, str]:
    """Name a request in a log line, as `extra`: what looks after logs runs outside of any request."""
    return {"uid": choice.uid, "request_id": choice.exchange.job.request_id}
