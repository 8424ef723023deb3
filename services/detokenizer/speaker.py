"""Says the tokens of a flush: each uid's pieces become entries of its log, by compare-and-append.

Owns the states of replies and the rule that keeps them true: a state is made from the log alone, and any
answer but the entry's own id throws it away. Whoever else writes the same log at the same time, each index
enters it once and in order. Knows nothing of token streams.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from services.detokenizer.metrics import DetokenizerMetrics
from services.detokenizer.pieces import Piece
from services.detokenizer.state import Reply, Texts, rebuild
from shared import tracing
from shared.broker.append import Flushes, Item
from shared.broker.call import Call
from shared.broker.connection import Broker
from shared.broker.log_id import LogId
from shared.broker.replies import LogEntry, read_log
from shared.errors import BrokerError, WireError
from shared.keys import APPEND_CAP

log = logging.getLogger(__name__)

_READ_LOGS: Final = 32
"""Logs read in one round trip: with thousands of tokens each they are still far from a lease's time."""


class Speaker:
    """Continues replies. Used by one thread.

    Args:
        broker: of the instance.
        texts: what ids print.
        metrics: of the detokenizer.
        beat: called between round trips: a flush over many long logs may take a while.
        max_replies: states kept; beyond it the longest silent go first.
        idle_s: silence after which a state is not kept.
    """

    def __init__(
        self,
        broker: Broker,
        texts: Texts,
        metrics: DetokenizerMetrics,
        *,
        beat: Callable[[], None] = lambda: None,
        max_replies: int,
        idle_s: float,
    ) -> None:
        self._broker = broker
        self._texts = texts
        self._metrics = metrics
        self._beat = beat
        self._max_replies = max_replies
        self._idle_s = idle_s
        self._replies: dict[str, Reply] = {}
        self._flushes = Flushes(broker.keys)
        metrics.replies.set_function(self.__len__)

    def __len__(self) -> int:
        """Count the states kept."""
        return len(self._replies)

    def say(self, queues: dict[str, list[Piece]]) -> None:
        """Settle every piece: it is in its log, or its log does not want it any more.

        Args:
            queues: uid -> its pieces, in order; empty when this returns.

        Raises:
            BrokerError: some may be written and some not. Say all of them again: what the logs have is skipped.
        """
        fresh: set[str] = set()
        while queues:
            stale = [uid for uid, queue in queues.items() if not self._may_go_on(uid, queue[0], fresh)]
            for i in range(0, len(stale), _READ_LOGS):
                self._rebuild(stale[i : i + _READ_LOGS], fresh)
                self._beat()
            items = list(self._next_items(queues, fresh))
            chain = self._flushes.chain
            try:
                answers = self._append(items)
            except BrokerError:
                self._flushes.begin_anew()
                for item in items:
                    self._replies.pop(item.uid, None)
                raise
            for item, answer in zip(items, answers, strict=True):
                self._settle(item, answer, chain, queues, fresh)

    def forget_all(self) -> None:
        """Throw all states away: the logs may be others than they were."""
        self._replies.clear()

    def forget_idle(self) -> None:
        """Throw away the states of replies that have been silent, and the longest silent of too many."""
        now = time.monotonic()
        idle = [uid for uid, reply in self._replies.items() if now - reply.touched_s > self._idle_s]
        for uid in idle:
            del self._replies[uid]
        excess = len(self._replies) - self._max_replies
        if excess > 0:
            by_silence = sorted(self._replies, key=lambda uid: self._replies[uid].touched_s)
            for uid in by_silence[:excess]:
                del self._replies[uid]

    def _may_go_on(self, uid: str, piece: Piece, fresh: set[str]) -> bool:
        """Whether the state can judge a piece. What it refuses, it must refuse on a fresh look at the log."""
        if uid in fresh:
            return True
        reply = self._replies.get(uid)
        return reply is not None and reply.continues(piece)

    def _rebuild(self, uids: Sequence[str], fresh: set[str]) -> None:
        self._metrics.rebuilds.inc(len(uids))
        for uid, entries in zip(uids, self._read_logs(uids), strict=True):
            fresh.add(uid)
            self._replies.pop(uid, None)
            try:
                reply = rebuild(entries, self._texts)
            except WireError as e:
                self._broken(uid, e)
                continue
            if reply is not None:
                self._replies[uid] = reply

    def _read_logs(self, uids: Sequence[str]) -> list[list[LogEntry]]:
        """Read logs in one round trip; one that cannot be read counts as gone and spoils no other."""
        calls: list[Call[Any]] = [read_log(self._broker.keys, uid) for uid in uids]
        try:
            return self._broker.run_many(calls)
        except WireError as e:
            if len(uids) == 1:
                self._broken(uids[0], e)
                return [[]]
        return [entries for uid in uids for entries in self._read_logs([uid])]

    def _broken(self, uid: str, error: WireError) -> None:
        self._metrics.dropped["broken"].inc()
        log.error("a reply log cannot be read: %s", error, extra={"uid": uid})

    def _next_items(self, queues: dict[str, list[Piece]], fresh: set[str]) -> Iterator[Item]:
        """Give at most one entry per uid. Pieces that need none leave their queues, empty queues go."""
        for uid in list(queues):
            queue = queues[uid]
            while queue and self._may_go_on(uid, queue[0], fresh):
                item = self._next_item(uid, queue[0])
                if item is not None:
                    yield item
                    break
                del queue[0]
            if not queue:
                del queues[uid]

    def _next_item(self, uid: str, piece: Piece) -> Item | None:
        reply = self._replies.get(uid)
        if reply is None:
            self._metrics.dropped["over"].inc()
            return None
        if not reply.continues(piece):
            reason = "gap" if piece.attempt == reply.attempt else "fenced"
            self._metrics.dropped[reason].inc()
            if reason == "gap":
                log.warning(
                    "tokens from %d on are not said: the log ends at %d",
                    piece.first,
                    reply.said,
                    extra={"uid": uid, "request_id": reply.header.request_id},
                )
            return None
        return reply.say(uid, piece)

    def _append(self, items: Sequence[Item]) -> list[LogId]:
        """Write entries, in one round trip."""
        calls = [self._flushes.append(items[i : i + APPEND_CAP]) for i in range(0, len(items), APPEND_CAP)]
        return [answer for answers in self._broker.run_many(calls) for answer in answers] if calls else []

    def _settle(self, item: Item, answer: LogId, chain: int, queues: dict[str, list[Piece]], fresh: set[str]) -> None:
        """Take in the answer to an entry: it is said, or its state was not true."""
        uid = item.uid
        fresh.discard(uid)
        if answer != item.log_id:
            self._metrics.refused.inc()
            del self._replies[uid]
            return
        queue = queues[uid]
        piece = queue.pop(0)
        if not queue:
            del queues[uid]
        self._metrics.tokens.inc(len(piece.ids))
        if item.terminal is None:
            reply = self._replies[uid]
            reply.chain, reply.touched_s = chain, time.monotonic()
            return
        _trace(uid, self._replies.pop(uid))
        if piece.finish is None:
            self._metrics.stop_matches.inc()


def _trace(uid: str, reply: Reply) -> None:
    """Record a finished reply in its trace, and in the log for those who look closely."""
    name, parent = reply.header.request_id, reply.header.traceparent
    tracing.record("detokenize", parent, reply.began_ns, time.time_ns(), request_id=name, tokens=reply.said)
    log.debug("said to its end: %d tokens", reply.said, extra={"uid": uid, "request_id": name})
