"""An event loop on a thread of its own, for tests that are no coroutines themselves."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines beside the test. Whoever makes one closes it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name)
        self._thread.start()

    def begin(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Let a coroutine run."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a short coroutine to its end."""
        return self.begin(work).result(30)

    def soon(self, work: Callable[..., object], *args: object) -> None:
        """Have a function called on the loop."""
        self._loop.call_soon_threadsafe(work, *args)

    def close(self) -> None:
        """End the loop and its thread."""
        self.soon(self._loop.stop)
        self._thread.join()
        self._loop.close()
