"""Root mean square normalisation."""

from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from services.scheduler.engine.layers.weight import Weight
from services.scheduler.engine.parallel.comm import SOLO, Comm


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Of several ranks it may be the end of what they compute apart: `add` adds that up.

    Attributes:
        weight: (size,).
        eps: added to the mean square.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device, comm: Comm = SOLO) -> None:
        self.weight = Weight((size,), (), dtype, device)
        self._shape = (size,)
        self.eps = eps
        self._comm = comm
        self._fused: Callable[..., Tensor] | None = None
        if device.type == "cuda":
            from services.scheduler.engine.kernels.elementwise import rms_norm  # Triton only where it is used

            self._fused = rms_norm

    def __call__(self, x: Tensor) -> Tensor:
        """(..., size) -> the same shape."""
        if self._fused is not None and x.dim() == 2:
            return self._fused(x, self.weight.tensor, self.eps)
        if x.is_cuda or x.dtype == torch.float32:
            return F.rms_norm(x, self._shape, self.weight.tensor, self.eps)
        # On a CPU torch makes it of parts, too, and of more: this is a twentieth of a step with one row.
        weight, eps = self._wide
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = torch.addcmul(eps, norm, norm, value=1 / self._shape[0]).rsqrt_()
        return wide.mul_(inverse).mul_(weight).to(x.dtype)

    @cached_property
    def _wide(self) -> tuple[Tensor, Tensor]:
        """Weight and eps in float32, once the weight is there."""
        return self.weight.tensor.float(), torch.full((), self.eps, dtype=torch.float32)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add x, of all ranks, to the residual stream, which is changed in place, and normalise it.

        Returns:
            The normalised sum and the sum.
        """
        found = self._comm.sum_norm(x, residual, self.weight.tensor, self.eps)
        if found is not None:
            return found, residual
        x = self._comm.all_reduce(x)
        if self._fused is not None:
            return self._fused(x, self.weight.tensor, self.eps, residual), residual
        residual += x
        return self(residual), residual
