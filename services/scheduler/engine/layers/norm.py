"""Root mean square normalisation."""

import torch
import torch.nn.functional as F
from torch import Tensor

from services.scheduler.engine.layers.weight import Weight


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Attributes:
        weight: (size,).
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = Weight((size,), (), dtype, device)
        self._shape = (size,)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """(..., size) -> the same shape."""
        return F.rms_norm(x, self._shape, self.weight.tensor, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream, which is changed in place, and normalise it.

        Returns:
            The normalised sum and the sum.
        """
        residual += x
        return self(residual), residual
