"""How much waits between the services: the length of each stream and the age of its oldest entry, by the broker.

Measured when somebody asks, once a second at most, in one round trip; so the figures are true even when the service
that should read a stream is dead, and cost nothing while nobody looks. The inbox of a replica is no queue: it is read
at once, and what is read stays in it for a while.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

from services.api.pipeline import Pipeline
from shared.broker.connection import AsyncBroker
from shared.broker.streams import backlog

MAX_MEASURED: Final = 128
"""Streams of one kind at most: bounds a round trip, in installations of any size."""
_FRESH_S: Final = 1.0

Hop = tuple[str, str, str]
"""Kind of the stream, the instance or model it belongs to, and its key."""


class Hops:
    """The queues of the installation. One per replica.

    Attributes:
        num_shards: token streams per model, as the installation has agreed.
        measured: what was measured last.
    """

    def __init__(self, broker: AsyncBroker, pipeline: Pipeline) -> None:
        self._broker = broker
        self._pipeline = pipeline
        self._lock = asyncio.Lock()
        self.measured: list[dict[str, Any]] = []
        self._at = float("-inf")
        self.num_shards = 0

    async def measure(self, models: Iterable[str]) -> list[dict[str, Any]]:
        """Give `stream`, `of`, `length` and `oldest_s` of every queue, at most a second old.

        Raises:
            BrokerError: it cannot be asked now.
        """
        async with self._lock:
            if time.monotonic() - self._at > _FRESH_S:
                hops = list(self._hops(models))
                found = await self._broker.run_many([backlog(key) for _, _, key in hops])
                self.measured = [
                    {"stream": stream, "of": of, "length": queue.length, "oldest_s": round(queue.age_s, 2)}
                    for (stream, of, _), queue in zip(hops, found, strict=True)
                ]
                self._at = time.monotonic()
            return self.measured

    def _hops(self, models: Iterable[str]) -> Iterator[Hop]:
        keys = self._broker.keys
        for model in list(models)[:MAX_MEASURED]:
            yield "tokenize", model, keys.tokenize(model)
            for shard in range(self.num_shards):
                yield "tokens", f"{model} {shard}", keys.tokens(model, shard)
        for engine in self._pipeline.names("scheduler")[:MAX_MEASURED]:
            yield "generate", engine, keys.generate(engine)
