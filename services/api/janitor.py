"""Ends and deletes reply logs behind requests that are over, a batch at a time, until the broker has done it.

A client's answer never waits for this. While the broker is away the work is kept and done when it is back; a
log that is missed anyway dies by its time to live, and its engine by its audit.
"""

import asyncio
import logging
from typing import Any, Final

from prometheus_client import Counter

from shared.broker.backoff import Backoff
from shared.broker.call import Call
from shared.broker.connection import AsyncBroker
from shared.broker.replies import OpenEntry, delete_logs, end, read_log
from shared.errors import BrokerDown, BrokerError, WireError
from shared.messages import Delta, ErrorBody

log = logging.getLogger(__name__)


CLIENT_GONE: Final = ErrorBody(499, "the client closed the connection", "client_closed", "client_closed")
_BATCH: Final = 256
_CAP: Final = 100_000
"""Uids kept while the broker is away; beyond it the oldest are left to their time to live."""


class Janitor:
    """The work that is left when requests are over. `run` does it; everything else only notes it."""

    def __init__(self, broker: AsyncBroker, strays: Counter) -> None:
        """Prepare; `run` works.

        Args:
            broker: shared with the rest of the replica.
            strays: counts the strays that are ended.
        """
        self._broker = broker
        self._num_strays = strays
        self._ends: dict[str, ErrorBody] = {}
        self._deletes: dict[str, None] = {}
        self._kept: set[str] = set()
        self._strays: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def end(self, uid: str, reason: ErrorBody, *, keep: bool = False) -> None:
        """End a uid, wherever it is, and delete its log; with `keep` the log lives out its time."""
        if len(self._ends) < _CAP:
            self._ends[uid] = reason
            if keep:
                self._kept.add(uid)
        self._notify()

    def delete(self, uid: str) -> None:
        """Delete a log whose terminal was delivered."""
        if len(self._deletes) < _CAP:
            self._deletes[uid] = None
        self._notify()

    def stray(self, uid: str) -> None:
        """End a uid that rings although nobody waits for it here, unless it is a stream that others may wait for."""
        if len(self._strays) < _CAP:
            self._strays[uid] = None
        self._notify()

    async def run(self) -> None:
        """Work for ever."""
        backoff = Backoff()
        while True:
            if not (self._ends or self._deletes or self._strays):
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
            try:
                await self._batch()
                backoff.reset()
            except BrokerDown:
                await asyncio.sleep(backoff.next_s())
            except (BrokerError, WireError):
                log.exception("reply logs could not be ended or deleted; they die by their time to live")
                self._ends.clear()
                self._deletes.clear()
                self._kept.clear()
                self._strays.clear()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return self._idle.is_set()

    async def settle(self, timeout_s: float) -> bool:
        """Wait until nothing is left to do; False if it took longer."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _notify(self) -> None:
        self._idle.clear()
        self._wake.set()

    async def _sort_strays(self) -> None:
        """Tell what may be ended by what the logs say of themselves."""
        uids = list(self._strays)[:_BATCH]
        heads = await self._broker.run_many([read_log(self._broker.keys, uid, count=1) for uid in uids])
        for uid, head in zip(uids, heads, strict=True):
            del self._strays[uid]
            if head and not (isinstance(head[0], OpenEntry) and head[0].header.resumable_ms):
                self._num_strays.inc()
                self._ends[uid] = CLIENT_GONE

    async def _batch(self) -> None:
        """Do a batch in one round trip; what it took is struck off only when the broker has answered."""
        keys = self._broker.keys
        await self._sort_strays()
        ends = dict(list(self._ends.items())[:_BATCH])
        deletes = [*(uid for uid in ends if uid not in self._kept), *list(self._deletes)[:_BATCH]]
        calls: list[Call[Any]] = [end(keys, uid, Delta(0, [], "", error=why)) for uid, why in ends.items()]
        if deletes:
            calls.append(delete_logs(keys, deletes))
        await self._broker.run_many(calls)
        for uid in (*ends, *deletes):
            self._ends.pop(uid, None)
            self._deletes.pop(uid, None)
            self._kept.discard(uid)
