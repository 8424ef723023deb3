"""The token embedding and the output head, one tensor or two.

Ranks that share a model share the vocabulary. Its pieces are of one size; what the last one lacks is never seen.
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from services.scheduler.engine.kernels.packed_linear import Product, pack
from services.scheduler.engine.layers.weight import Split, Weight
from services.scheduler.engine.parallel.comm import SOLO, Comm


class Embedding:
    """Token ids to vectors.

    Attributes:
        weight: (vocab_size, hidden_size), or this rank's piece of it.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device, comm: Comm = SOLO
    ) -> None:
        self._comm = comm
        self._piece = -(-vocab_size // comm.ranks.size)
        self._first = comm.ranks.rank * self._piece
        self.weight = Weight((self._piece,), (hidden_size,), dtype, device, Split(0, comm.ranks, vocab_size))

    def __call__(self, input_ids: Tensor) -> Tensor:
        """(num_tokens,) int64 -> (num_tokens, hidden_size); of several ranks, a part of their sum."""
        if self._comm.ranks.size == 1:
            return F.embedding(input_ids, self.weight.tensor)
        if self.weight.tensor.is_cuda:
            from services.scheduler.engine.kernels.elementwise import embed_piece  # Triton only where it is used

            return embed_piece(input_ids, self.weight.tensor, self._first)
        places = input_ids - self._first
        others = (places < 0) | (places >= self._piece)
        found = F.embedding(places.masked_fill(others, 0), self.weight.tensor)
        return found.masked_fill(others[:, None], 0)


_REFINED: Final = 1.0
"""How far below the largest logit others are computed again."""
_MAX_REFINED: Final = 256
"""Above this many per row on average none is."""


class Head:
    """Vectors to logits. Tied to an embedding it has no weight of its own.

    Attributes:
        weight: (vocab_size, hidden_size), or this rank's piece of it; None when tied.
        first_id: the token that this rank's piece begins with.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        tied: Embedding | None,
        comm: Comm = SOLO,
    ) -> None:
        piece = -(-vocab_size // comm.ranks.size)
        split = Split(0, comm.ranks, vocab_size)
        self.weight = None if tied is not None else Weight((piece,), (hidden_size,), dtype, device, split)
        self.first_id = comm.ranks.rank * piece
        self._own = max(0, min(piece, vocab_size - self.first_id))
        self._vocab_size = vocab_size
        self._comm = comm
        self._tied = tied
        self._product: Product | None = None

    def finish(self) -> None:
        """Lay the weight out for the device, once it is there."""
        if self._tied is not None:
            self._product = pack(self._tied.weight.tensor, None)
        else:
            assert self.weight is not None
            self._product = pack(self.weight.tensor, None)
            self.weight = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """(num_drawn, hidden_size) -> (num_drawn, vocab_size), in the model's precision or a finer one."""
        local = self._compute(hidden)
        return local if self._comm.ranks.size == 1 else self._comm.all_gather(local)[:, : self._vocab_size]

    def piece(self, hidden: Tensor) -> Tensor:
        """The same of this rank's piece of the vocabulary alone, which begins at `first_id`."""
        return self._compute(hidden)[:, : self._own]

    def _compute(self, hidden: Tensor) -> Tensor:
        assert self._product is not None, "called before its weights were loaded"
        local = self._product(hidden, 0)
        if self._tied is not None and local.device.type == "cpu" and local.dtype == torch.bfloat16:
            local = _refine(local, hidden, self._tied.weight.tensor)
        return local


def _refine(logits: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """Compute the likeliest logits again in float32: bfloat16 has steps of 1/8 where they lie, and so many ties.

    Args:
        logits: (n, vocab_size) bfloat16.
        hidden: (n, hidden_size) what they were made of.
        weight: (vocab_size, hidden_size) likewise.

    Returns:
        (n, vocab_size) float32.
    """
    found = logits.float()
    rows, ids = (found >= found.amax(-1, keepdim=True) - _REFINED).nonzero(as_tuple=True)
    if len(ids) <= _MAX_REFINED * len(logits):  # rows of NaN have none, rows that are flat too many
        found[rows, ids] = (weight[ids].float() * hidden[rows].float()).sum(-1)
    return found
