"""CUDA graphs of forward passes: one per padded size, captured once and replayed with other numbers.

Owns the graphs, what they leave behind, and their memory; knows neither requests nor slots, nor what a size counts.
"""

import gc
import logging
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from tqdm import tqdm

from services.scheduler.engine.parallel.comm import SOLO, Comm

log = logging.getLogger(__name__)

_SMALL: Final = (1, 2, 4)
MAX_MIXED_TOKENS: Final = 2048
"""Larger steps take the device longer than the host, graph or not."""


def decode_sizes(max_rows: int) -> list[int]:
    """Rows of steps of single tokens that get a graph: dense where steps are short, and `max_rows` unless it is 0."""
    sizes = [*_SMALL, *range(8, min(max_rows, 256) + 1, 8), *range(272, max_rows + 1, 16), max_rows]
    return sorted({size for size in sizes if 0 < size <= max_rows})


def mixed_sizes(max_tokens: int) -> list[int]:
    """Tokens of steps with prompts that get a graph: padding costs at most a tenth where products cost time."""
    sizes = [16, *range(32, 513, 32), *range(576, 1025, 64), *range(1152, MAX_MIXED_TOKENS + 1, 128)]
    return [size for size in sizes if size <= max_tokens]


class StepGraphs:
    """The graphs of one kind of step."""

    pool: Any = None
    """Memory that all graphs of a process share: no two are replayed at the same time."""

    def __init__(self, kind: str, compute: Callable[[int], Tensor], comm: Comm = SOLO) -> None:
        """Say what is captured.

        Args:
            kind: of step, for the log.
            compute: computes a step of that size, from buffers at fixed places.
            comm: the ranks, which have graphs of the same sizes.
        """
        self._kind = kind
        self._compute = compute
        self._comm = comm
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._next: list[int] = []

    @property
    def sizes(self) -> list[int]:
        """The sizes that were captured."""
        return sorted(self._graphs)

    def size_for(self, size: int) -> int | None:
        """The smallest captured size that is not smaller, if there is one."""
        return self._next[size] if size < len(self._next) else None

    def replay(self, size: int) -> Tensor:
        """Launch a captured step; returns what it leaves, always in the same place."""
        graph, result = self._graphs[size]
        graph.replay()
        return result

    def result(self, size: int) -> Tensor:
        """What a captured step leaves, and will leave again."""
        return self._graphs[size][1]

    def capture(self, sizes: list[int], *, show: bool = True) -> None:
        """Capture sizes, largest first, on the current stream; one that cannot be is left out with a warning.

        Each is computed without a graph before: what libraries prepare at first use cannot be captured, and a step
        that fails there would fail when it serves. A bar on stderr shows how far it is, when that is a terminal.

        Raises:
            RuntimeError: a step failed without a graph, for lack of memory, say.
        """
        gc.collect()
        gc.disable()
        try:
            hidden = not (show and sys.stderr.isatty())
            for size in tqdm(sorted(sizes, reverse=True), f"{self._kind} graphs", leave=False, disable=hidden):
                # Not caught: of several ranks the others would wait for ever for the sums of this one.
                self._compute(size)
                try:
                    self._graphs[size] = self._capture(size)
                except RuntimeError as e:  # out of memory too
                    log.warning("no %s graph of %d: such steps run without one: %s", self._kind, size, e)
                if not self._comm.least(int(size in self._graphs)):
                    self._graphs.pop(size, None)
        finally:
            gc.enable()
        self._next = []
        for size in self.sizes:
            self._next += [size] * (size + 1 - len(self._next))

    def drop(self) -> None:
        """Free the graphs."""
        self._graphs = {}
        self._next = []

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        stream = torch.cuda.current_stream()
        stream.synchronize()
        if StepGraphs.pool is None:
            StepGraphs.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as one that watches the ranks' group, may go on with what they do.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=StepGraphs.pool, stream=stream, capture_error_mode=mode):
            result = self._compute(size)
        return graph, result
