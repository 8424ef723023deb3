"""The connections to the broker: one round trip per list of calls, every failure told as BrokerDown.

Owns sockets, TLS, sentinels and who shares a connection with whom. Nothing is sent twice behind the caller's
back, and a dead connection is never replaced silently: its user is told BrokerDown, backs off (`Backoff`), comes
back, and follows its own rule for a broker it has lost sight of.
"""

import asyncio
import logging
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from weakref import WeakSet

from redis.exceptions import ResponseError

from shared.broker import server
from shared.broker.call import Call
from shared.broker.conversation import LOST, Commands, converse, translate
from shared.broker.dial import SOCKET_TIMEOUT_S, async_dialer, dialer
from shared.errors import BrokerDown
from shared.keys import Keys
from shared.settings import RedisSettings

T = TypeVar("T")

SHARED_CONNECTIONS: Final = 16
"""Connections that the ordinary calls of an event loop share."""

_log = logging.getLogger(__name__)


class Broker:
    """The broker as threads see it: each thread that calls has a connection of its own.

    Attributes:
        keys: names of this installation's keys.
        url: where it is, without secrets, for logs.
        num_strange: keys of ours that held what a stranger had put there; it was put aside.
    """

    def __init__(self, settings: RedisSettings, *, name: str = "millrace", timeout_s: float = SOCKET_TIMEOUT_S) -> None:
        """Prepare; nothing is connected yet.

        Args:
            settings: where the broker is.
            name: of the connections, in CLIENT LIST.
            timeout_s: how long a connection, or an answer, may take; shorter only where no call blocks.

        Raises:
            ConfigError: the URL cannot be understood, or the password file not read.
        """
        self._dialer = dialer(settings, name, timeout_s)
        self.keys = Keys(settings.redis_prefix)
        self.url = str(self._dialer.target)
        self._mine = threading.local()
        self._all: WeakSet[Any] = WeakSet()
        self._lock = threading.Lock()
        self.num_strange = 0

    def run(self, call: Call[T]) -> T:
        """Make one call.

        Raises:
            BrokerDown: it may or may not have happened. BrokerFull: the server is out of memory.
            BrokerError: the server refused it for good.
            WireError: the answer holds bytes that are no message of ours.
        """
        answer: T = self.run_many((call,))[0]
        return answer

    def run_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Make several calls in one round trip, in order, not atomically. Answers in order; errors as `run`.

        After an error it is not known which of them have happened.
        """
        if not calls:
            return []
        conversation = converse(calls, self.keys, self._put_aside)
        commands = next(conversation)
        try:
            while True:
                commands = conversation.send(self._exchange(commands))
        except StopIteration as done:
            answers: list[Any] = done.value
            return answers
        except BrokerDown:
            self._connection().disconnect()  # a demoted or loading server: ask again where the master is
            raise

    def prepare(self) -> server.Agreement:
        """Check the server and agree with the rest of the installation: at start, and when the broker is back.

        Raises:
            ConfigError: the server is too old or a cluster, or the installation speaks another wire version.
            BrokerDown, BrokerError: as `run`.
        """
        _warn(self.run(server.info()))  # alone: a cluster would not even take the next question
        agreement = self.run(server.agree(self.keys))
        server.check_agreement(self.keys, agreement)
        return agreement

    def close(self) -> None:
        """Close the connections of all threads, whose calls then end with BrokerDown. A later call connects anew."""
        with self._lock:
            for connection in self._all:
                connection.disconnect()
        for sentinel in self._dialer.sentinels:
            sentinel.close()

    def __enter__(self) -> Self:
        """Give the broker; it is closed at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close."""
        self.close()

    def _put_aside(self, names: list[bytes]) -> None:
        with self._lock:
            self.num_strange += len(names)
        _tell_strange(names)

    def _exchange(self, commands: Commands) -> list[Any]:
        connection = self._connection()
        try:
            connection.connect()
            connection.send_packed_command([b"".join(connection.pack_commands(commands))])  # one system call
            return [self._answer(connection) for _ in commands]
        except BaseException as e:
            connection.disconnect()  # unread answers must never be taken for those of the next call
            if isinstance(e, LOST):
                raise translate(e) from e
            raise

    def _connection(self) -> Any:
        try:
            return self._mine.connection
        except AttributeError:
            connection = self._mine.connection = self._dialer.dial()
            with self._lock:
                self._all.add(connection)
            return connection

    @staticmethod
    def _answer(connection: Any) -> Any:
        try:
            return connection.read_response()
        except ResponseError as e:
            return e


class AsyncBroker:
    """The broker as tasks of one event loop see it; the same as `Broker` otherwise.

    Ordinary calls share a few connections and wait for each other; a blocking read never makes others wait.
    """

    def __init__(self, settings: RedisSettings, *, name: str = "millrace") -> None:
        """Prepare; nothing is connected yet. Raises as `Broker`."""
        self._dialer = async_dialer(settings, name)
        self.keys = Keys(settings.redis_prefix)
        self.url = str(self._dialer.target)
        self._idle: list[Any] = []
        self._room = asyncio.Semaphore(SHARED_CONNECTIONS)
        self.num_strange = 0

    async def run(self, call: Call[T]) -> T:
        """Make one call. Raises as `Broker.run`."""
        answer: T = (await self.run_many((call,)))[0]
        return answer

    async def run_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Make several calls in one round trip, in order, not atomically. Answers and errors as `Broker.run_many`."""
        if not calls:
            return []
        if any(call.blocks for call in calls):
            return await self._run_many(calls)
        async with self._room:
            return await self._run_many(calls)

    async def prepare(self) -> server.Agreement:
        """Check the server and agree with the rest of the installation. Raises as `Broker.prepare`."""
        _warn(await self.run(server.info()))
        agreement = await self.run(server.agree(self.keys))
        server.check_agreement(self.keys, agreement)
        return agreement

    async def close(self) -> None:
        """Close the connections that no call is using; a call that is cancelled closes its own."""
        await self._drop(nowait=False)
        for sentinel in self._dialer.sentinels:
            await sentinel.aclose()

    async def _run_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        conversation = converse(calls, self.keys, self._put_aside)
        commands = next(conversation)
        try:
            while True:
                commands = conversation.send(await self._exchange(commands))
        except StopIteration as done:
            answers: list[Any] = done.value
            return answers
        except BrokerDown:
            await self._drop(nowait=True)  # the others are as dead, or lead to the same server
            raise

    def _put_aside(self, names: list[bytes]) -> None:
        self.num_strange += len(names)
        _tell_strange(names)

    async def _drop(self, *, nowait: bool) -> None:
        """Close idle connections; to wait for the closing may fail in its own way."""
        while self._idle:
            await self._idle.pop().disconnect(nowait=nowait)

    async def _exchange(self, commands: Commands) -> list[Any]:
        connection = self._idle.pop() if self._idle else self._dialer.dial()
        try:
            async with asyncio.timeout(SOCKET_TIMEOUT_S):
                await connection.connect()
                await connection.send_packed_command([b"".join(connection.pack_commands(commands))])
                answers = [await self._answer(connection) for _ in commands]
        except BaseException as e:  # a cancelled call too leaves unread answers behind
            await connection.disconnect(nowait=True)
            if isinstance(e, LOST):
                raise translate(e) from e
            raise
        self._idle.append(connection)
        return answers

    @staticmethod
    async def _answer(connection: Any) -> Any:
        try:
            return await connection.read_response()
        except ResponseError as e:
            return e


def _warn(info: server.ServerInfo) -> None:
    for warning in server.check(info):
        _log.warning("%s", warning)


def _tell_strange(names: list[bytes]) -> None:
    for name in names:
        _log.error("the key %s held something else than it must; it was put aside", name.decode(errors="replace"))
