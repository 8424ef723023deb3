"""A rank above 0 on a GPU: it launches what rank 0 launches, and waits for nothing.

What that is it is told (`parallel.orders`). Knows no request.
"""

from collections import deque

import numpy as np
import torch
from torch import Tensor

from services.scheduler.core.batch import ScoreRow
from services.scheduler.engine.gpu_rank import GpuRank
from services.scheduler.engine.parallel.orders import DrawMode, DrawOrder, Order, PagesOrder, ScoreOrder, StepOrder
from services.scheduler.engine.sampler import score_tokens


class GpuFollower:
    """Follows orders on its device."""

    def __init__(self, rank: GpuRank) -> None:
        self._rank = rank
        self._hidden: Tensor | None = None
        self._replayed: int | None = None
        self._owed: deque[tuple[Tensor, list[int]]] = deque()

    def follow(self, order: Order) -> None:
        """Launch what is ordered."""
        with torch.inference_mode(), self._rank.streams.compute():
            match order:
                case StepOrder():
                    self._compute(order)
                case DrawOrder():
                    self._draw(order.draw, order.num_drawn)
                case PagesOrder():
                    block = self._rank.forward.block
                    image = block.open()
                    image.from_bytes(order.image)
                    image.send(whole=False)
                    block.lay_out("", 1)
                case ScoreOrder():
                    hidden, scored = self._owed.popleft()
                    for part, count in zip(torch.split(hidden, scored), scored, strict=True):
                        score_tokens(self._rank.model.logits, part, ScoreRow(0, np.zeros(count, np.int32), 0))

    def close(self) -> None:
        """Let the device finish."""
        self._rank.close()

    def _compute(self, order: StepOrder) -> None:
        forward, plan = self._rank.forward, order.plan
        image = forward.block.open()
        image.from_bytes(order.image)
        self._hidden = forward.launch(image, plan)
        self._replayed = plan.size if plan.path == "decode_graph" else None
        if order.scored:
            self._owed.append((self._hidden[order.num_drawn :][: sum(order.scored)], order.scored))
        if order.draw != "none":
            self._draw(order.draw, order.num_drawn)

    def _draw(self, mode: DrawMode, num_drawn: int) -> None:
        rank, hidden = self._rank, self._hidden
        assert hidden is not None
        if mode == "told":
            rank.model.logits(hidden[:num_drawn])  # rank 0 draws from all of them
            rank.sampler.take_told(num_drawn, rank.comm)
        else:
            rank.draw(mode, hidden, num_drawn, self._replayed)
