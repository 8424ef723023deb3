"""Waiting in tests: for a condition, with a limit, and with a clear word when it does not come."""

import signal
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T], what: str, timeout_s: float = 60.0, every_s: float = 0.02) -> T:
    """Give the first true value of a condition; fail when none comes in time."""
    pause = threading.Event()
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not in {timeout_s:g} s: {what}"
        pause.wait(every_s)


def heed_all_signals() -> None:
    """Let a child have the signals that whoever runs the tests may ignore (nohup, a shell's background job)."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
