"""A wire between the services and Redis that can be made slow, or cut."""

import asyncio
from contextlib import suppress
from typing import Final

_CHUNK: Final = 1 << 16


class Proxy:
    """Carries bytes both ways between whoever connects and one server.

    Attributes:
        delay_s: every chunk of bytes waits for so long, in each direction.
        port: where it listens, on the loopback interface.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.delay_s = 0.0
        self.port = 0

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Listen no more, and cut what is there."""
        if self._server is not None:
            self._server.close()
        self.cut()

    def cut(self) -> None:
        """Break all connections, both ways."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            try:
                there, back = await asyncio.open_connection("127.0.0.1", self._target)
            except OSError:
                return
            self._writers.add(back)
            try:
                await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
            finally:
                self._writers.discard(back)
                back.transport.abort()
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Carry one direction; its end is the end of both."""
        with suppress(OSError):
            while data := await source.read(_CHUNK):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                sink.write(data)
                await sink.drain()
        sink.transport.abort()
