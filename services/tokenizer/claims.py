"""Takes over what dead tokenizers have left in the queue's group: one entry at a time, each done before the next."""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

from services.tokenizer.worker import Worker
from shared.broker.connection import Broker
from shared.broker.control import retire
from shared.broker.streams import claim_one, forget_consumer, list_consumers
from shared.keys import LEASE_S

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0


class Claims:
    """Who of the group is gone. Used by the worker's thread alone.

    A consumer is gone when its lease is over, or when it has not been registered for a lease (it ended cleanly
    and left requests for which there was no engine, or its entry in the registry was lost).

    Args:
        broker: of this instance.
        model: served name.
        consumer: the incarnation of this instance.
        worker: does what is claimed.
        living: incarnations of the living tokenizers.
        dead: incarnations of those whose lease is over.
        forgettable: incarnation -> encoded last heartbeat of those whom others, too, have seen dead.
        lease_s: seconds a consumer may be unknown.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        broker: Broker,
        model: str,
        consumer: str,
        worker: Worker,
        *,
        living: Callable[[], Collection[str]],
        dead: Callable[[], Collection[str]],
        forgettable: Callable[[], Mapping[str, bytes]],
        lease_s: float = LEASE_S["tokenizer"],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker = broker
        self._model = model
        self._consumer = consumer
        self._worker = worker
        self._living = living
        self._dead = dead
        self._forgettable = forgettable
        self._lease_s = lease_s
        self._clock = clock
        self._unknown_since: dict[str, float] = {}
        self._next_look_s = 0.0
        self._seen_dead: frozenset[str] = frozenset()

    def lost(self) -> None:
        """The connection was lost: nothing was seen for an unknown time."""
        self._unknown_since.clear()

    def look(self, beat: Callable[[], None]) -> None:
        """Look for the dead when one has just died, else once a second, and do what they left.

        Args:
            beat: called after every entry.

        Raises:
            BrokerError: as `Worker.turn`.
        """
        dead = frozenset(self._dead())
        now = self._clock()
        if dead <= self._seen_dead and now < self._next_look_s:
            return
        self._next_look_s = now + LOOK_S
        consumers = self._broker.run(list_consumers(self._broker.keys, self._model))
        for consumer in sorted(self._gone(consumers, dead, now)):
            self._inherit(consumer, beat)
            del consumers[consumer]
        for incarnation, last in self._forgettable().items():
            if incarnation not in consumers:
                self._broker.run(retire(self._broker.keys, "tokenizer", incarnation, last))
        self._seen_dead = dead

    def _gone(self, consumers: Collection[str], dead: Collection[str], now: float) -> list[str]:
        living = self._living()
        unknown = [c for c in consumers if c != self._consumer and c not in living and c not in dead]
        self._unknown_since = {c: self._unknown_since.get(c, now) for c in unknown}
        overdue = [c for c, since in self._unknown_since.items() if now - since > self._lease_s]
        return overdue + [c for c in consumers if c in dead]

    def _inherit(self, consumer: str, beat: Callable[[], None]) -> None:
        keys, count = self._broker.keys, 0
        while entry := self._broker.run(claim_one(keys, self._model, consumer, self._consumer)):
            self._worker.take_over(entry)
            count += 1
            beat()
        if count:
            log.warning("took over %d requests of the tokenizer %s", count, consumer)
        self._broker.run(forget_consumer(keys, self._model, consumer))
        self._unknown_since.pop(consumer, None)
