"""CUDA graphs of decode steps: one per padded number of rows, captured once and replayed with other numbers.

Each size has two graphs: the forward pass, from the block to the final states, and the draw, from there to the
tokens. Between the two the engine may wait for something, or draw in another way. Owns the graphs and their
memory; knows neither requests nor slots.
"""

import gc
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from tqdm import tqdm

log = logging.getLogger(__name__)

_SMALL: Final = (1, 2, 4)


def graph_sizes(max_rows: int) -> list[int]:
    """The numbers of rows that get a graph: dense where steps are short, and `max_rows` itself."""
    sizes = [*_SMALL, *range(8, min(max_rows, 256) + 1, 8), *range(272, max_rows + 1, 16), max_rows]
    return sorted({size for size in sizes if size <= max_rows})


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """One size.

    Attributes:
        rows: padding included.
        forward: computes `hidden`.
        hidden: (rows, hidden_size), written by `forward`.
        draw: draws from `hidden`.
    """

    rows: int
    forward: torch.cuda.CUDAGraph
    hidden: Tensor
    draw: torch.cuda.CUDAGraph


class DecodeGraphs:
    """The graphs of an engine."""

    def __init__(self, forward: Callable[[int], Tensor], draw: Callable[[Tensor], None]) -> None:
        """Say what is captured.

        Args:
            forward: computes the final states of a decode step of that many rows, from buffers at fixed places.
            draw: draws from final states, to buffers at fixed places.
        """
        self._forward = forward
        self._draw = draw
        self._graphs: dict[int, DecodeGraph] = {}
        self._by_rows: list[DecodeGraph | None] = []
        self._pool: Any = None

    @property
    def sizes(self) -> list[int]:
        """The sizes that were captured."""
        return sorted(self._graphs)

    def find(self, rows: int) -> DecodeGraph | None:
        """The smallest graph for that many rows, if there is one."""
        return self._by_rows[rows] if rows < len(self._by_rows) else None

    def capture(self, sizes: list[int], *, show: bool = True) -> None:
        """Capture sizes, largest first, on the current stream; one that fails is left out with a warning.

        A bar on stderr shows how far it is, when that is a terminal.
        """
        gc.collect()
        gc.disable()
        try:
            hidden = not (show and sys.stderr.isatty())
            for size in tqdm(sorted(sizes, reverse=True), "capturing graphs", leave=False, disable=hidden):
                try:
                    self._graphs[size] = self._capture(size)
                except RuntimeError as e:  # out of memory too
                    log.warning("no graph for %d rows: such steps run without one: %s", size, e)
        finally:
            gc.enable()
        self._by_rows = []
        for size in self.sizes:
            self._by_rows += [self._graphs[size]] * (size + 1 - len(self._by_rows))

    def _capture(self, rows: int) -> DecodeGraph:
        # Once without a graph: what libraries prepare at first use cannot be captured.
        self._draw(self._forward(rows))
        torch.cuda.current_stream().synchronize()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream()
        forward, draw = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, pool=self._pool, stream=stream):
            hidden = self._forward(rows)
        with torch.cuda.graph(draw, pool=self._pool, stream=stream):
            self._draw(hidden)
        return DecodeGraph(rows, forward, hidden, draw)
