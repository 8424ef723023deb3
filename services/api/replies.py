"""The replica's side of the protocol: opens requests, reads the inbox, says deltas, ends what its clients leave.

One reader serves all requests of the replica. The inbox is the fast path and the doorbell; whatever does not
follow directly on what was said is read from the log (`repair.py`). Knows jobs and choices, nothing of HTTP.
Protocol: docs/protocol.md, the rules of the api.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from typing import Final

from services.api.exchange import Choice, Exchange
from services.api.janitor import CLIENT_GONE, Janitor
from services.api.limits import refuse
from services.api.metrics import ApiMetrics
from services.api.patience import run_patiently
from services.api.repair import Repair
from services.api.requests import make_choices, make_request
from shared.broker.backoff import Backoff
from shared.broker.connection import AsyncBroker
from shared.broker.log_id import LogId, split_log_id
from shared.broker.replies import Ring, read_inbox, trim_inbox
from shared.broker.streams import FIRST, Opened, open_request
from shared.errors import BrokerDown, BrokerError, MillraceError, RateLimited, WireError
from shared.messages import Delta, ErrorBody, decode

log = logging.getLogger(__name__)

RECENT_S: Final = 20.0
"""How long an answered uid is remembered: what still rings for it is old, not a stranger's."""
_ENDS_HERE: Final = frozenset({"client_closed", "shutting_down", "broker_lost_data", "invalid_value"})
"""Codes of errors that end a client's answer, but not the stream, if it can be resumed."""


class Replies:
    """All requests of this replica that are in flight.

    Attributes:
        choices: uid -> choice, until its request is closed.
        exchanges: requests in flight.
    """

    def __init__(
        self, broker: AsyncBroker, replica: str, janitor: Janitor, repair: Repair, metrics: ApiMetrics
    ) -> None:
        """Prepare; `run` reads.

        Args:
            broker: shared with the rest of the replica.
            replica: the incarnation, which names the inbox.
            janitor: ends and deletes logs behind the requests.
            repair: reads logs and opens them again.
            metrics: of the api.
        """
        self._broker = broker
        self._replica = replica
        self._janitor = janitor
        self._repair = repair
        self._metrics = metrics
        self._recent: OrderedDict[str, float] = OrderedDict()
        self.choices: dict[str, Choice] = {}
        self.exchanges: set[Exchange] = set()

    async def open(self, exchange: Exchange, cap: int) -> None:
        """Register a request and queue it. When this raises, the caller closes the exchange all the same.

        Args:
            exchange: the request.
            cap: entries the tokenize queue may hold.

        Raises:
            RateLimited: the queue is full. KeyLimited: the API key is over a limit.
            Unavailable: the broker has no room.
            BrokerError: the broker is away.
        """
        for choice in exchange.choices:
            self.choices[choice.uid] = choice
        self.exchanges.add(exchange)
        request, claim = make_request(exchange.job, exchange.choices), exchange.job.claim
        call = open_request(self._broker.keys, request, make_choices(exchange, self._replica), cap=cap, claim=claim)
        self._opened(exchange, await run_patiently(self._broker, call))

    def _opened(self, exchange: Exchange, opened: Opened) -> None:
        if opened.outcome == "FULL":
            raise RateLimited("the queue of this model is full; try again later")
        if opened.outcome == "CHANGED":  # an earlier try of this very call went through, its answer was lost
            for choice in exchange.choices:
                choice.opened = True
                self._repair.start(choice)
            return
        if opened.outcome == "LIMITED":
            assert exchange.job.claim is not None, "only a claim is judged"
            raise refuse(exchange.job.claim, opened)
        exchange.levels = opened.levels
        for choice, log_id in zip(exchange.choices, opened.log_ids, strict=True):
            choice.opened = True
            choice.entry = opened.entry
            if not choice.last_id:  # a delta may have rung before this answer was seen
                choice.last_id = log_id
            choice.attempt = max(choice.attempt, split_log_id(log_id)[0])

    def close(self, exchange: Exchange, reason: ErrorBody = CLIENT_GONE) -> None:
        """Forget a request: delete the logs that have ended, end the others with a reason and delete them too.

        A stream that its client may come back to goes on, unless the reason holds for all who read it.
        """
        now = time.monotonic()
        self.exchanges.discard(exchange)
        if exchange.job.resume_ms and exchange.announced:
            self._part_with(exchange, reason)
            return
        for choice in exchange.choices:
            choice.closed = True
            if self.choices.pop(choice.uid, None) is None:
                continue
            self._recent[choice.uid] = now
            if choice.ended is None:
                self._janitor.end(choice.uid, reason)
            else:
                self._janitor.delete(choice.uid)
        self._forget_old()

    def _forget_old(self) -> None:
        since = time.monotonic() - RECENT_S
        while self._recent and next(iter(self._recent.values())) < since:
            self._recent.popitem(last=False)

    def _part_with(self, exchange: Exchange, reason: ErrorBody) -> None:
        """Let a stream go on without its client."""
        for choice in exchange.choices:
            choice.closed = True
            if self.choices.get(choice.uid) is choice:
                del self.choices[choice.uid]
                self._recent[choice.uid] = time.monotonic()
            if choice.ended is None and reason.code not in _ENDS_HERE:
                self._janitor.end(choice.uid, reason, keep=True)
        self._forget_old()

    def catch_up(self, exchange: Exchange) -> None:
        """Fetch what was left in the logs while the client was slow. Called by the writer when it has caught up."""
        exchange.lagging = False
        for choice in exchange.choices:
            if choice.behind:
                choice.behind = False
                self._repair.start(choice)

    async def run(self) -> None:
        """Read the inbox for ever.

        After a lost connection, and after a second of silence, it is read from its beginning: a broker that came
        back without its data, or with an older clock, writes below the old position. What was read is trimmed
        away before, and what is read twice is dropped by its id.
        """
        keys, position, backoff = self._broker.keys, FIRST, Backoff()
        while True:
            try:
                rings = await self._broker.run(read_inbox(keys, self._replica, after=position))
                if rings.position != position:  # also when all that was read is none of ours
                    position = rings.position
                    self._metrics.inbox_hop.observe(max(0.0, time.time() - int(position.partition(b"-")[0]) / 1000))
                elif position != FIRST:
                    await self._broker.run(trim_inbox(keys, self._replica, position))
                    position = FIRST
                backoff.reset()
            except BrokerDown:
                position = FIRST
                await asyncio.sleep(backoff.next_s())
                continue
            except (BrokerError, WireError) as e:
                log.error("the inbox cannot be read: %s", e)  # once per pause, without a trace
                await asyncio.sleep(backoff.next_s())
                continue
            for ring in rings.rings:
                self._ring(ring)

    def _ring(self, ring: Ring) -> None:
        """Say a delta if it follows on what was said; else drop it (known) or have the log read (a gap)."""
        uid, prev, log_id, blob = ring
        choice = self.choices.get(uid)
        if choice is None:
            if uid not in self._recent:
                self._recent[uid] = time.monotonic()
                self._forget_old()
                self._janitor.stray(uid)
            return
        if choice.ended is not None:
            return
        if choice.reading:
            choice.again = True
        elif choice.exchange.full:
            choice.exchange.leave_behind(choice)
        elif follows(choice, prev):
            self._say(choice, log_id, blob)
        elif split_log_id(log_id) > split_log_id(LogId(choice.last_id)):
            self._repair.start(choice)

    def _say(self, choice: Choice, log_id: LogId, blob: bytes) -> None:
        try:
            choice.say(decode(Delta, blob), log_id)
        except MillraceError:
            self._repair.start(choice)  # the log tells what its entry is; a second look decides


def is_over(exchange: Exchange) -> bool:
    """Whether the request of an answer that is about to end is over with it, for all who might read it."""
    if not exchange.goes_on:
        return True
    failure, error = exchange.failure, exchange.first_error()
    return error is not None and (failure is None or failure.code not in _ENDS_HERE)


def follows(choice: Choice, prev: LogId) -> bool:
    """Whether a delta whose predecessor is `prev` continues what the client was told.

    Normally `prev` is the last id said. While nothing was said at all, a predecessor that holds no token will do,
    if it is no older than the log: the engine's first fence lies between, and no telling can be contradicted.
    """
    if prev == choice.last_id:
        return True
    return choice.said == 0 and prev.endswith(b"-0") and split_log_id(prev)[0] >= choice.attempt
