"""A call to the broker that a client waits for: a connection that has just died is not the client's trouble."""

import asyncio
from typing import Final, TypeVar

from shared.broker.backoff import Backoff
from shared.broker.call import Call
from shared.broker.connection import AsyncBroker
from shared.errors import BrokerDown, BrokerFull, Unavailable

T = TypeVar("T")

_TRIES: Final = 3


async def run_patiently(broker: AsyncBroker, call: Call[T]) -> T:
    """Make a call, which may happen twice, again on new connections.

    Raises:
        Unavailable: the broker has no room.
        BrokerError: the broker is away.
    """
    backoff = Backoff()
    for _ in range(_TRIES - 1):
        try:
            return await _run(broker, call)
        except BrokerDown:
            await asyncio.sleep(backoff.next_s())
    return await _run(broker, call)


async def _run(broker: AsyncBroker, call: Call[T]) -> T:
    try:
        return await broker.run(call)
    except BrokerFull as e:
        raise Unavailable("the message broker has no room for more requests", code="broker_full") from e
