"""Streams for a device without any: every call returns when it is done. What the GPU engine is tested on."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from services.scheduler.engine.stream import Mark, Streams


class NoStreams(Streams):
    """The same for a device where every call returns when it is done; what tests run the engine on."""

    def __init__(self, multiprocessors: int = 4) -> None:
        self.multiprocessors = multiprocessors

    @contextmanager
    def compute(self) -> Iterator[None]:
        """Run what is inside."""
        yield

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Run what is inside."""
        yield

    def after_copy(self) -> None:
        """Nothing is under way."""

    def mark(self) -> Mark:
        """Take the time."""
        return _Moment()

    def pinned(self, size: int) -> Tensor:
        """Plain memory will do."""
        return torch.zeros(size, dtype=torch.int32)

    def finish(self) -> None:
        """Nothing is under way."""


class _Moment:
    def __init__(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        """It has passed."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Mark) -> float:
        assert isinstance(later, _Moment)
        return 1e3 * (later._at - self._at)
