"""A decoder layer for one to four tokens: the same numbers with fewer and narrower kernels.

Norms, the gated activation and the sums of the residual stream go into the products beside them. Knows which
layers have that form; the arithmetic is the kernel's.
"""

from typing import Final

from torch import Tensor

from services.scheduler.engine.context import ForwardContext
from services.scheduler.engine.layers.attention import Attention
from services.scheduler.engine.layers.linear import Linear
from services.scheduler.engine.layers.norm import RMSNorm
from services.scheduler.engine.layers.rotary import Angles

_MAX_HIDDEN: Final = 2560
"""Every program makes the norm of the whole input again; of larger models the products are well read as they are."""


class FewLayer:
    """The parts of a layer, called in another way."""

    def __init__(
        self,
        norms: tuple[RMSNorm, RMSNorm],
        qkv: Tensor,
        attention: Attention,
        output: Tensor,
        gate_up: Tensor,
        down: Tensor,
    ) -> None:
        """Take the parts; `make_few` says whether they fit."""
        self._norms = [(norm.weight.tensor, norm.eps) for norm in norms]
        self._qkv = qkv
        self._attention = attention
        self._output = output
        self._gate_up = gate_up
        self._down = down

    def __call__(self, residual: Tensor, angles: Angles, context: ForwardContext) -> None:
        """Run the layer on the (num_tokens, hidden_size) residual stream, in place."""
        from services.scheduler.engine.kernels.few_linear import few_linear  # Triton only where it is used

        qkv = few_linear(residual, self._qkv, norm=self._norms[0])
        few_linear(self._attention(qkv, angles, context), self._output, add_to=residual)
        inner = few_linear(residual, self._gate_up, norm=self._norms[1], gated=True)
        few_linear(inner, self._down, add_to=residual)


def make_few(
    norms: tuple[RMSNorm, RMSNorm], qkv: Linear, attention: Attention, output: Linear, gate_up: Linear, down: Linear
) -> FewLayer | None:
    """Make the form for few tokens, where the layer's weights allow it."""
    weights = (qkv.plain, output.plain, gate_up.plain, down.plain)
    if any(weight is None for weight in weights) or qkv.in_features > _MAX_HIDDEN:
        return None
    from services.scheduler.engine.kernels.few_linear import fits  # Triton only where it is used

    found = [weight for weight in weights if weight is not None]
    if any(weight.dtype.itemsize != 2 or not fits(*weight.shape) for weight in found):
        return None
    return FewLayer(norms, found[0], attention, *found[1:])
