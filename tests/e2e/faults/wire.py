"""A wire to a server that a test can make slow, or cut."""

import asyncio

from bench.chaos.proxy import Proxy
from tests.e2e.faults.loops import LoopThread


class Wire:
    """Carries bytes between the services and a server, on a thread of its own; use as a context."""

    def __init__(self, port: int) -> None:
        self._proxy = Proxy(port)
        self._loop = LoopThread("wire")

    def __enter__(self) -> "Wire":
        self._loop.call(self._proxy.start())
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call(self._close())
        self._loop.close()

    @property
    def port(self) -> int:
        """Where to connect instead."""
        return self._proxy.port

    def delay(self, seconds: float) -> None:
        """Let every chunk of bytes wait, in each direction."""
        self._loop.soon(setattr, self._proxy, "delay_s", seconds)

    def cut(self) -> None:
        """Break all connections."""
        self._loop.soon(self._proxy.cut)

    async def _close(self) -> None:
        await self._proxy.stop()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.wait(tasks) if tasks else None
