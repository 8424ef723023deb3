"""The streams of a GPU, and the marks between them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, cast

import torch
from torch import Tensor


class Mark(Protocol):
    """A place in a stream, like `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Wait until the stream has come to it."""
        ...

    def query(self) -> bool:
        """Whether the stream has come to it."""
        ...

    def elapsed_time(self, later: "Mark") -> float:
        """Milliseconds between two marks that have passed."""
        ...


def new_event(*, timing: bool = False) -> torch.cuda.Event:
    """Make an event."""
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Make a stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Streams:
    """The compute stream and the copy stream of a GPU.

    Attributes:
        multiprocessors: of the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._compute = new_stream(device)
        self._copy = new_stream(device)
        self._copied: torch.cuda.Event | None = None

    @contextmanager
    def compute(self) -> Iterator[None]:
        """Run what is inside on the compute stream."""
        with torch.cuda.stream(self._compute):
            yield

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Run what is inside on the copy stream, behind what has been launched on the compute stream."""
        self._copy.wait_stream(self._compute)
        with torch.cuda.stream(self._copy):
            yield
            self._copied = new_event()
            self._copied.record(self._copy)

    def after_copy(self) -> None:
        """Have the compute stream wait until what was last copied has left its place."""
        if self._copied is not None:
            self._compute.wait_event(self._copied)

    def mark(self) -> Mark:
        """Mark the current place of the current stream."""
        event = new_event(timing=True)
        event.record()
        return cast(Mark, event)

    def pinned(self, size: int) -> Tensor:
        """(size,) int32 on the host, that copies need not wait for."""
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def finish(self) -> None:
        """Wait until both have nothing left to do."""
        self._compute.synchronize()
        self._copy.synchronize()
