"""The token embedding and the output head, one tensor or two."""

import torch
import torch.nn.functional as F
from torch import Tensor

from services.scheduler.engine.kernels.packed_linear import Product, pack
from services.scheduler.engine.layers.weight import Weight


class Embedding:
    """Token ids to vectors.

    Attributes:
        weight: (vocab_size, hidden_size).
    """

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = Weight((vocab_size,), (hidden_size,), dtype, device)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """(num_tokens,) int64 -> (num_tokens, hidden_size)."""
        return F.embedding(input_ids, self.weight.tensor)


class Head:
    """Vectors to logits. Tied to an embedding it has no weight of its own.

    Attributes:
        weight: (vocab_size, hidden_size), or None when tied.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device, tied: Embedding | None
    ) -> None:
        self.weight = None if tied is not None else Weight((vocab_size,), (hidden_size,), dtype, device)
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
        """(num_drawn, hidden_size) -> (num_drawn, vocab_size), in the model's precision."""
        assert self._product is not None, "called before its weights were loaded"
        return self._product(hidden, 0)
