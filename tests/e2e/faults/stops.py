"""Instances that stand still."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from tests.e2e.stack import Stack


@contextmanager
def stopped(stack: Stack, instance: str) -> Iterator[None]:
    """Let an instance stand still during the block."""
    pid = stack.pids()[instance]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
