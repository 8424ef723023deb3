"""What rank 0 tells the ranks of a GPU engine: what it gives its own device, and which calls it makes behind that.

A follower plans nothing and looks at no request: the image of a step's block is copied to its device as it is, and the
numbers beside it say which graph is replayed, or how the layers run. So its host has less to do than rank 0's, and
every rank makes the same calls in the same order.
"""

from typing import Literal

import msgspec

from services.scheduler.core.batch import StepPath

DrawMode = Literal["none", "pieces", "whole", "told"]
"""How the rows of a step that draw do so: not now; each rank from its piece of the vocabulary, and the best wins;
each rank from all logits, alike; rank 0 alone, which tells the others."""


class StepPlan(msgspec.Struct, array_like=True, frozen=True):
    """How a step that is written down is computed.

    Attributes:
        path: replayed, and from which graphs; or layer by layer.
        size: rows or tokens of the graph; tokens of a step without one.
        num_decode: leading rows of one token; this and what follows only of a step without a graph.
        num_chunks: prompt chunks behind them.
        num_pieces: of the chunks' work, as the prefill kernel cuts it.
        num_wanted: final states.
    """

    path: StepPath
    size: int
    num_decode: int = 0
    num_chunks: int = 0
    num_pieces: int = 0
    num_wanted: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether all of the block is read, and not only its front."""
        return self.path != "decode_graph"


class PagesOrder(msgspec.Struct, array_like=True, frozen=True, tag="pages"):
    """Changes of the page table that go ahead of a step: the front of the block."""

    image: bytes


class StepOrder(msgspec.Struct, array_like=True, frozen=True, tag="step"):
    """A step.

    Attributes:
        plan: how it is computed.
        image: the block, or its front.
        num_drawn: rows that draw.
        draw: how.
        scored: rows whose prompt is scored, when the step has retired: positions of each.
    """

    plan: StepPlan
    image: bytes
    num_drawn: int
    draw: DrawMode
    scored: list[int]


class DrawOrder(msgspec.Struct, array_like=True, frozen=True, tag="draw"):
    """The draw of the step before, whose masks are there now."""

    num_drawn: int
    draw: DrawMode


class ScoreOrder(msgspec.Struct, array_like=True, frozen=True, tag="score"):
    """The scores of the oldest step that still owes some."""


Order = PagesOrder | StepOrder | DrawOrder | ScoreOrder
