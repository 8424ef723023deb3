"""Root mean square normalisation."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from services.scheduler.engine.layers.weight import Weight


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Attributes:
        weight: (size,).
        eps: added to the mean square.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = Weight((size,), (), dtype, device)
        self._shape = (size,)
        self.eps = eps
        self._fused: Callable[..., Tensor] | None = None
        if device.type == "cuda":
            from services.scheduler.engine.kernels.elementwise import rms_norm  # Triton only where it is used

            self._fused = rms_norm

    def __call__(self, x: Tensor) -> Tensor:
        """(..., size) -> the same shape."""
        if self._fused is not None and x.dim() == 2:
            return self._fused(x, self.weight.tensor, self.eps)
        return F.rms_norm(x, self._shape, self.weight.tensor, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream, which is changed in place, and normalise it.

        Returns:
            The normalised sum and the sum.
        """
        if self._fused is not None:
            return self._fused(x, self.weight.tensor, self.eps, residual), residual
        residual += x
        return self(residual), residual
