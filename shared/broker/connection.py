"""The connection to the broker: one round trip per list of calls, every failure told as BrokerDown.

Owns sockets, pools, TLS and the loading of scripts. Never repeats a call by itself, except where the server has
said that it did not run: a forgotten script or a missing consumer group. After BrokerDown the caller backs off,
comes back, and follows its own rule for a broker it has lost sight of.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from shared.broker.call import Call
from shared.keys import Keys
from shared.settings import RedisSettings

T = TypeVar("T")


class Broker:
    """The broker as threads see it. Any number of threads may share one; each blocking read has a connection.

    Attributes:
        keys: names of this installation's keys.
        url: where it is, without secrets, for logs.
    """

    keys: Keys
    url: str

    def __init__(self, settings: RedisSettings, *, name: str = "millrace") -> None:
        """Prepare; nothing is connected yet.

        Args:
            settings: where the broker is.
            name: of the connections, in CLIENT LIST.

        Raises:
            ConfigError: the URL cannot be understood, or the CA file is missing.
        """

    def run(self, call: Call[T]) -> T:
        """Make one call.

        Raises:
            BrokerDown: it may or may not have happened. BrokerFull: the server is out of memory.
            BrokerError: the server refused it for good.
        """

    def run_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Make several calls in one round trip, in order, not atomically. Answers in order; errors as `run`."""

    def close(self) -> None:
        """Close all connections. The broker can be used again; it then connects anew."""

    def __enter__(self) -> Self:
        """Give the broker; it is closed at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close."""
        self.close()


class AsyncBroker:
    """The broker as tasks of one event loop see it; the same as `Broker` otherwise.

    Ordinary calls share a few connections; each blocking read has one of its own.
    """

    keys: Keys
    url: str

    def __init__(self, settings: RedisSettings, *, name: str = "millrace") -> None:
        """Prepare; nothing is connected yet. Raises as `Broker`."""

    async def run(self, call: Call[T]) -> T:
        """Make one call. Raises as `Broker.run`."""

    async def run_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Make several calls in one round trip, in order, not atomically."""

    async def close(self) -> None:
        """Close all connections."""
