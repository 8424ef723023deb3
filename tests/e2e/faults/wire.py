"""A wire to a server that a test can make slow, or cut."""

import asyncio
import threading
from typing import Any

from bench.chaos.proxy import Proxy


class Wire:
    """Carries bytes between the services and a server, on a thread of its own; use as a context."""

    def __init__(self, port: int) -> None:
        self._proxy = Proxy(port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wire")

    def __enter__(self) -> "Wire":
        self._thread.start()
        self._call(self._proxy.start())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def port(self) -> int:
        """Where to connect instead."""
        return self._proxy.port

    def delay(self, seconds: float) -> None:
        """Let every chunk of bytes wait, in each direction."""
        self._loop.call_soon_threadsafe(setattr, self._proxy, "delay_s", seconds)

    def cut(self) -> None:
        """Break all connections."""
        self._loop.call_soon_threadsafe(self._proxy.cut)

    async def _close(self) -> None:
        await self._proxy.stop()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.wait(tasks) if tasks else None

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)
